// Numbers and times as text.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined) {
    return "–";
  }
  let unit = 0;
  let scaled = value;
  while (scaled >= 1024 && unit < UNITS.length - 1) {
    scaled /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? scaled : short(scaled)} ${UNITS[unit] ?? ""}`;
}

/** Three significant digits. */
export function short(value: number | null | undefined): string {
  if (value === null || value === undefined) {
    return "–";
  }
  const size = Math.abs(value);
  if (size >= 1e6) {
    return `${short(value / 1e6)}M`;
  }
  if (size >= 10_000) {
    return `${short(value / 1000)}k`;
  }
  return String(Number(size >= 10 ? value.toFixed(size >= 100 ? 0 : 1) : size >= 0.1 ? value.toFixed(2) : value.toPrecision(2)));
}

export function percent(share: number): string {
  return `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
}

export function milliseconds(value: number | null | undefined): string {
  if (value === null || value === undefined) {
    return "–";
  }
  return value >= 10_000 ? `${short(value / 1000)} s` : `${short(value)} ms`;
}

/** A timestamp of the server, as milliseconds since 1970. Without a time zone it is UTC. */
export function parseTime(text: string): number {
  const zoned = /:\d\d(\.\d+)?$/.test(text) ? `${text}Z` : text.replace(/([+-]\d\d)$/, "$1:00");
  return Date.parse(zoned.replace(" ", "T"));
}

/** A time as a timestamp of the server, in UTC. */
export function toTimestamp(at: Date): string {
  return at.toISOString().replace("T", " ").replace("Z", "+00");
}

const TIME = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" } as const;
const CLOCK = new Intl.DateTimeFormat(undefined, TIME);
const MINUTES = new Intl.DateTimeFormat(undefined, { ...TIME, second: undefined });
const DAY = new Intl.DateTimeFormat(undefined, { ...TIME, year: "numeric", month: "short", day: "numeric" });

/** A time of day, of a time in seconds. */
export function clock(at: number, withSeconds = true): string {
  return (withSeconds ? CLOCK : MINUTES).format(new Date(at * 1000));
}

/** The time of day, with the date if that is not today. */
export function time(at: string | number): string {
  const date = new Date(typeof at === "number" ? at : parseTime(at));
  if (Number.isNaN(date.getTime())) {
    return "–";
  }
  return (date.toDateString() === new Date().toDateString() ? CLOCK : DAY).format(date);
}

/** How long something took, or how long ago it was. */
export function duration(ms: number): string {
  const seconds = Math.max(0, ms) / 1000;
  if (seconds < 60) {
    return `${seconds < 10 ? seconds.toFixed(1) : seconds.toFixed(0)} s`;
  }
  const minutes = seconds / 60;
  return minutes < 120 ? `${minutes.toFixed(0)} min` : `${(minutes / 60).toFixed(0)} h`;
}

export function count(number: number, noun: string): string {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

/** A limit such as "20ms" or "1.5s" in milliseconds. */
export function limitMs(text: string | null | undefined): number | null {
  const match = /^([\d.]+)\s*(us|ms|s|min|h|d)?$/.exec(text ?? "");
  if (!match) {
    return null;
  }
  const units: Record<string, number> = { us: 0.001, ms: 1, s: 1000, min: 60_000, h: 3_600_000, d: 86_400_000 };
  return Number(match[1]) * (units[match[2] ?? "ms"] ?? 1);
}
