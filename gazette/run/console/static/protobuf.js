// The fields of a protobuf message whose class is not known: by number, one on each line.

const FIELDS_MAX = 100;

export function fieldsText(base64) {
  const data = Uint8Array.from(atob(base64), (one) => one.charCodeAt(0));
  const lines = [];
  let at = 0;

  function varint() {
    let number = 0n;
    for (let shift = 0n; shift < 70n && at < data.length; shift += 7n) {
      const byte = data[at];
      at += 1;
      number |= BigInt(byte & 0x7f) << shift;
      if (byte < 0x80) return number;
    }
    return null;
  }

  while (at < data.length && lines.length < FIELDS_MAX) {
    const tag = varint();
    if (tag === null) break;
    const wire = Number(tag & 7n);
    let text;
    if (wire === 0) text = String(varint());
    else if (wire === 1 || wire === 5) {
      const size = wire === 1 ? 8 : 4;
      text = `0x${hex(data.slice(at, at + size).reverse())}`;
      at += size;
    } else if (wire === 2) {
      const length = varint();
      if (length === null) break;
      text = valueText(data.slice(at, at + Number(length)));
      at += Number(length);
    } else break;
    lines.push(`${tag >> 3n}: ${text}`);
  }
  return lines.join("\n") || `x'${hex(data)}'`;
}

const hex = (value) => [...value].map((one) => one.toString(16).padStart(2, "0")).join("");

function valueText(value) {
  const digits = hex(value);
  if (value.length === 16 && digits[12] === "1") return [digits.slice(0, 8), digits.slice(8, 12), digits.slice(12, 16), digits.slice(16, 20), digits.slice(20)].join("-");
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(value);
    if (!/[\u0000-\u0008\u000b-\u001f]/.test(text)) return JSON.stringify(text);
  } catch {
    // Not a text: its bytes are shown.
  }
  return `x'${digits}'`;
}
