/* Formats numbers and times in the same way as `baton explain`. */

export const UNKNOWN = "–";

/** A duration with at most three digits, in ms or s. */
export function duration(seconds) {
  if (!isKnown(seconds)) return UNKNOWN;
  const ms = seconds * 1000;
  const size = Math.abs(ms);
  if (size < 0.05) return "0 ms";
  if (size < 9.95) return `${ms.toFixed(1)} ms`;
  if (size < 999.5) return `${ms.toFixed(0)} ms`;
  if (size < 9995) return `${seconds.toFixed(2)} s`;
  return size < 99950 ? `${seconds.toFixed(1)} s` : `${seconds.toFixed(0)} s`;
}

/** A whole number with thousands separators. */
export function counted(number) {
  return isKnown(number) ? Math.round(number).toLocaleString("en") : UNKNOWN;
}

/** A whole number in at most five characters: 9,999, 12.3K, 4.56M. */
export function compact(number) {
  if (!isKnown(number) || number < 10000) return counted(number);
  const units = ["", "K", "M", "G", "T"];
  let size = number;
  while (size >= 999.5 && units.length > 1) {
    size /= 1000;
    units.shift();
  }
  return `${size.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0)}${units[0]}`;
}

/** Like duration, beyond 100 s in minutes or hours. */
export function longDuration(seconds) {
  if (!isKnown(seconds) || seconds < 99.95) return duration(seconds);
  return seconds < 5997 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** A rate per second. */
export function rate(number) {
  if (!isKnown(number)) return UNKNOWN;
  if (number > 0 && number < 0.05) return "< 0.1";
  return number < 9.95 ? number.toFixed(number === 0 ? 0 : 1) : counted(number);
}

/** Bytes in the largest unit that keeps the number at least 1. */
export function inBytes(count) {
  if (!isKnown(count)) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = count;
  while (size >= 1024 && units.length > 1) {
    size /= 1024;
    units.shift();
  }
  return `${size.toFixed(units[0] === "B" || size >= 99.95 ? 0 : 1)} ${units[0]}`;
}

/** A ratio in percent. */
export function percent(ratio) {
  return isKnown(ratio) ? `${(ratio * 100).toFixed(0)} %` : UNKNOWN;
}

/** An instant as local time. */
export function clock(atUnixS) {
  return new Date(atUnixS * 1000).toLocaleTimeString("en-GB");
}

/** An instant as local date and time. */
export function dateAndTime(atUnixS) {
  return `${new Date(atUnixS * 1000).toLocaleDateString("en-CA")} ${clock(atUnixS)}`;
}

/** A number with its noun in singular or plural. */
export function plural(number, one, many = `${one}s`) {
  return `${counted(number)} ${number === 1 ? one : many}`;
}

/** -1 and null mean not known. */
export function isKnown(number) {
  return typeof number === "number" && Number.isFinite(number) && number >= 0;
}
