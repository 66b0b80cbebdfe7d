// The API of the node: JSON, and a stream of server-sent events.

/** A result of the API: rows as arrays. */
export interface Table {
  columns: string[];
  rows: unknown[][];
}

/** Rows as objects. */
export function rows<T>(table: Table | null | undefined): T[] {
  if (!table) {
    return [];
  }
  return table.rows.map((row) => {
    const object: Record<string, unknown> = {};
    table.columns.forEach((column, index) => (object[column] = row[index]));
    return object as T;
  });
}

/** An error of the API. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly detail?: string,
    readonly hint?: string,
  ) {
    super(message);
  }

  /** The token is not accepted. */
  get isRefused(): boolean {
    return this.status === 401 || this.status === 403;
  }
}

const KEY = "fulmar-token";

export function token(): string | null {
  return sessionStorage.getItem(KEY);
}

export function setToken(value: string | null): void {
  if (value === null) {
    sessionStorage.removeItem(KEY);
  } else {
    sessionStorage.setItem(KEY, value);
  }
}

async function send(path: string, options: RequestInit, secret = token()): Promise<Response> {
  let response: Response;
  try {
    // No cookies: the token in this header is the only credential.
    response = await fetch(`api/${path}`, {
      ...options,
      credentials: "omit",
      cache: "no-store",
      headers: { ...options.headers, Authorization: `Bearer ${secret ?? ""}` },
    });
  } catch {
    throw new ApiError(0, "The node cannot be reached.");
  }
  if (response.ok) {
    return response;
  }
  const body = (await response.json().catch(() => null)) as {
    error?: { message?: string; detail?: string; hint?: string };
  } | null;
  const error = body?.error;
  throw new ApiError(
    response.status,
    error?.message ?? `The node answered with status ${response.status}.`,
    error?.detail,
    error?.hint,
  );
}

/** Checks a token that the operator has entered. */
export async function check(secret: string): Promise<void> {
  await send("overview", {}, secret);
}

export async function get<T>(path: string, signal: AbortSignal): Promise<T> {
  const response = await send(path, { signal: AbortSignal.any([signal, AbortSignal.timeout(20_000)]) });
  return (await response.json()) as T;
}

/** An action, as JSON. */
export type Action = Record<string, string | number | undefined>;

/** Runs an action. Returns whether it still runs. */
export async function act(action: Action): Promise<boolean> {
  const response = await send("actions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(action),
  });
  return response.status === 202;
}

/** What a stream delivers. */
export interface StreamHandler {
  event(name: string, data: unknown): void;
  /** Something has arrived: the node answers. */
  alive(): void;
}

/** The node sends something every two seconds. */
const SILENCE_MS = 10_000;

/** Reads the event stream until it ends. Throws if the token is refused. */
export async function stream(handler: StreamHandler, signal: AbortSignal): Promise<void> {
  const silent = new AbortController();
  let timer = 0;
  const restart = () => {
    window.clearTimeout(timer);
    timer = window.setTimeout(() => silent.abort(), SILENCE_MS);
  };
  restart();
  try {
    const response = await send("stream", { signal: AbortSignal.any([signal, silent.signal]) });
    const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const piece = await reader?.read();
      if (!piece || piece.done) {
        return;
      }
      restart();
      handler.alive();
      text += piece.value;
      const events = text.split("\n\n");
      text = events.pop() ?? "";
      for (const event of events) {
        deliver(event, handler);
      }
    }
  } finally {
    window.clearTimeout(timer);
  }
}

function deliver(event: string, handler: StreamHandler): void {
  let name = "";
  let data = "";
  for (const line of event.split("\n")) {
    if (line.startsWith("event: ")) {
      name = line.slice(7);
    } else if (line.startsWith("data: ")) {
      data += line.slice(6);
    }
  }
  if (name) {
    handler.event(name, JSON.parse(data));
  }
}
