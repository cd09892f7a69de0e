// Rates of counters, between two samples of one process.

const samples = new Map();

// Returns the rise of each counter in a second, by name; null before the second sample.
export function rates(key, at, counters) {
  const known = samples.get(key);
  if (at === null || at === undefined) return null;
  if (!known || at < known.at) samples.set(key, { at, counters, rates: null });
  else if (at > known.at) {
    const seconds = at - known.at;
    samples.set(key, { at, counters, rates: Object.fromEntries(Object.entries(counters).map(([name, number]) => {
      const before = known.counters[name] ?? 0; // A counter that became smaller began again at zero.
      return [name, (number >= before ? number - before : number) / seconds];
    })) });
  }
  return samples.get(key).rates;
}

// Adds the rates of a shard to its row.
export function withRates(row) {
  const counters = { read_messages: row.read_messages, read_bytes: row.read_bytes, transactions: row.transactions };
  return { ...row, rates: rates(`shard ${row.id}`, row.sampled_at, counters) ?? {},
    shares: rates(`phases ${row.id}`, row.sampled_at, row.phases) ?? {} };
}
