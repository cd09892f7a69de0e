// Asks the console. Every failure is a sentence, and what to do.

const DEADLINE_MS = 45000;
const SECRET = "gazette-console";

// Only pages of this port have the secret: a browser sends the cookie to other ports of the host, too.
export const enter = (secret) => localStorage.setItem(SECRET, secret);

// Returns a function that begins a turn. It returns a function that says whether a later turn has begun.
export function turns() {
  let last = 0;
  return () => {
    const mine = ++last;
    return () => mine !== last;
  };
}

export class Problem extends Error {
  constructor(message, hint, closed = false) {
    super(message);
    this.hint = hint;
    this.closed = closed;
  }
}

async function answer(url, options) {
  let response;
  try {
    const headers = { ...options.headers, "X-Gazette-Console": localStorage.getItem(SECRET) ?? "" };
    response = await fetch(url, { ...options, headers, signal: AbortSignal.timeout(DEADLINE_MS) });
  } catch (error) {
    if (error.name === "TimeoutError") {
      throw new Problem(`The console did not answer within ${DEADLINE_MS / 1000} s.`, "It is asked again.");
    }
    throw new Problem("The console does not answer: it has stopped, or is being started.",
      "Start `gazette ui` again, and open the address that it prints.");
  }
  let document;
  try {
    document = await response.json();
  } catch {
    throw new Problem(`The console answered ${response.status} without a document.`, "Load the page again.");
  }
  if (!response.ok) {
    throw new Problem(String(document.error ?? response.status), String(document.hint ?? ""), document.closed === true);
  }
  return document;
}

export function ask(route, args = {}) {
  const query = new URLSearchParams(
    Object.entries(args).filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => [name, String(value)]));
  return answer(`/api/${route}?${query}`, {});
}

export function change(route, args) {
  return answer(`/api/${route}`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(args),
  });
}
