// Numbers, times and sizes for people.

export function number(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US").replace("-", "−");
  const size = Math.abs(value);
  const text = size >= 1e6 || size < 1e-4 ? value.toExponential(3) : size >= 10 ? value.toFixed(2) : value.toPrecision(4);
  return text.replace(/^-/, "−");
}

export function bytes(count) {
  for (const [scale, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (count >= scale) return `${(count / scale).toPrecision(3)} ${unit}`;
  }
  return `${count} B`;
}

export const seconds = (value) => (value >= 1 ? `${value.toPrecision(3)} s` : `${(1000 * value).toPrecision(3)} ms`);
export const moment = (text) => (text || "").slice(0, 19).replace("T", " ");
export const short = (digest) => (digest || "").slice(0, 12);
export const spans = (pairs) => pairs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
