// Lists that several pages show: moves, decisions, events and statements.

import { confirm } from "./dialogs";
import { h, reconcile, setText } from "./dom";
import { bytes, count, duration, milliseconds, parseTime, time } from "./format";
import { tenantLink, type Page } from "./map";
import type { DecisionRow, EventRow, Model, MoveRow, SlowStatementRow, StatementRow } from "./model";

function part(element: HTMLElement, selector: string): HTMLElement {
  return element.querySelector<HTMLElement>(selector) ?? element;
}

/** A section with a heading, a list and a text for the empty list. */
export function section(id: string, title: string, list: HTMLElement, ...rest: HTMLElement[]): HTMLElement {
  return h("section", { class: "panel", "aria-labelledby": id }, h("h2", { id }, title), list, ...rest);
}

/** What a list shows instead of rows: that it is empty, or that its rows are not known yet. */
export function setEmpty(empty: HTMLElement, isLoaded: boolean, isEmpty: boolean, text: string): void {
  empty.hidden = isLoaded && !isEmpty;
  setText(empty, isLoaded ? text : "Loading…");
}

/** Moves in progress, with their progress, and the newest ended ones. */
export function createMoves(model: Model, ofTenant: string | null, most: number): Page {
  const list = h("ul", { class: "rows moves" });
  const empty = h("p", { class: "empty" });
  const element = section("moves-title", "Moves", list, empty);
  const update = () => {
    const isShown = (move: MoveRow) => ofTenant === null || move.tenant === ofTenant;
    const running = model.runningMoves().filter(isShown);
    const shown = [...running, ...model.endedMoves().filter(isShown).slice(0, most)];
    setEmpty(empty, model.has("moves"), shown.length === 0, "No moves yet");
    reconcile(list, shown, (move) => `${move.partition} ${move.number} ${running.includes(move)}`, createMove, updateMove);
  };
  return { element, update };
}

function createMove(move: MoveRow): HTMLElement {
  const tenant = move.tenant ?? "(dropped)";
  const isRunning = move.step === "copying" || move.step === "handing over" || move.step === "undoing";
  const cancel = h(
    "button",
    {
      class: "small",
      "aria-label": `Cancel the move of ${tenant}`,
      onclick: () =>
        confirm({
          title: `Cancel the move of ${tenant}`,
          body: [h("p", {}, `The tenant stays at ${move.source}. What was copied is discarded.`)],
          button: "Cancel move",
          action: () => ({ action: "cancel_move", database: tenant, partition: move.partition }),
          done: `The move of ${tenant} was cancelled.`,
        }),
    },
    "Cancel",
  );
  return h(
    "li",
    { class: "move" },
    h(
      "div",
      { class: "line" },
      h("a", { href: tenantLink(tenant) }, tenant),
      h("span", {}, ` ${move.source} → ${move.destination} `),
      h("span", { class: "badge step" }),
      isRunning && move.step !== "undoing" && cancel,
    ),
    isRunning && h("progress", { "aria-label": `Progress of the move of ${tenant}`, max: 1 }),
    h("div", { class: "about" }),
  );
}

function updateMove(element: HTMLElement, move: MoveRow): void {
  const step = part(element, ".step");
  setText(step, move.step);
  step.classList.toggle("bad", move.error !== null);
  const progress = element.querySelector("progress");
  if (progress) {
    if (move.step === "copying" && move.expected_bytes > 0) {
      progress.value = Math.min(1, move.bytes / move.expected_bytes);
    } else {
      progress.removeAttribute("value");
    }
    const expected = move.expected_bytes > 0 ? ` of about ${bytes(move.expected_bytes)}` : "";
    const elapsed = duration(Date.now() - parseTime(move.started));
    setText(
      part(element, ".about"),
      `${move.mechanism}, ${bytes(move.bytes)}${expected}, ${elapsed}, expected pause ${milliseconds(move.expected_pause_ms)}`,
    );
    return;
  }
  const failed = move.failed > 0 ? `, ${move.failed} transactions failed` : "";
  const error = move.error === null ? "" : `: ${move.error}`;
  setText(
    part(element, ".about"),
    `${time(move.started)}, ${move.mechanism}, ${bytes(move.bytes)} in ${duration(move.total_ms)}, ` +
      `pause ${milliseconds(move.pause_ms)}${failed}${error}`,
  );
}

/** Decisions with their reasons and what came of them. */
export function createDecisions(model: Model, most: number): Page {
  const list = h("ol", { class: "rows decisions" });
  const empty = h("p", { class: "empty" });
  const element = section("decisions-title", "Decisions", list, empty);
  const update = () => {
    const shown = model.decisions.slice(0, most);
    setEmpty(empty, model.has("decisions"), shown.length === 0, "No decisions yet");
    reconcile(list, shown, (decision) => String(decision.number), createDecision, updateDecision);
  };
  return { element, update };
}

function createDecision(decision: DecisionRow): HTMLElement {
  const predicted = decision.predicted === "" ? null : h("div", { class: "about" }, `Predicted: ${decision.predicted}`);
  return h(
    "li",
    {},
    h("div", { class: "line" }, h("time", {}, time(decision.time)), " ", h("strong", {}, decision.what)),
    h("div", {}, decision.why),
    predicted,
    h("div", { class: "about outcome" }),
  );
}

function updateDecision(element: HTMLElement, decision: DecisionRow): void {
  const outcome = decision.outcome ?? (decision.mode === "advise" ? "advice only" : "in progress");
  setText(part(element, ".outcome"), `Outcome: ${outcome}`);
}

const SEVERITIES: Record<string, string> = { info: "", warning: "▲ ", error: "■ " };

/** The newest events of the node that owns the database `fulmar`. */
export function createEvents(model: Model, ofTenant: string | null, most: number, isLive: boolean): Page {
  const list = h("ol", { class: "rows events", ...(isLive ? { role: "log", "aria-live": "polite" } : {}) });
  const empty = h("p", { class: "empty" });
  const note = h("p", { class: "note" });
  const element = section("events-title", "Events", list, empty, note);
  const update = () => {
    const events = model.events.filter((event) => ofTenant === null || event.database === ofTenant);
    setEmpty(empty, model.has("events"), events.length === 0, "No events");
    // Another node numbers its events alike.
    const key = (event: EventRow) => `${model.thisNode} ${event.id} ${event.time}`;
    setText(note, model.isCluster ? `Events of ${model.thisNode}. Other nodes have their own.` : "");
    reconcile(list, events.slice(0, most), key, createEvent, () => undefined);
  };
  return { element, update };
}

function createEvent(event: EventRow): HTMLElement {
  const details = Object.entries(event.details ?? {}).map(
    ([name, value]) => `${name}: ${typeof value === "object" ? JSON.stringify(value) : String(value)}`,
  );
  const severity = SEVERITIES[event.severity] ?? "";
  return h(
    "li",
    { class: event.severity },
    h(
      "div",
      { class: "line" },
      h("time", {}, time(event.time)),
      " ",
      severity !== "" && h("span", { class: "severity" }, `${severity}${event.severity} `),
      event.database === null
        ? h("span", {}, event.text)
        : h("span", {}, h("a", { href: tenantLink(event.database) }, event.database), `: ${event.text}`),
    ),
    h("div", { class: "about" }, [event.kind, event.user === null ? "" : `by ${event.user}`, ...details].filter((text) => text !== "").join(", ")),
  );
}

/** Where a list of running statements is from. */
interface StatementSource {
  statements: () => StatementRow[];
  isLoaded: () => boolean;
  /** The node that runs them. */
  node: () => string;
  note: () => string;
}

/** Statements that run now, the longest first. */
export function createStatements({ statements, isLoaded, node, note }: StatementSource): Page {
  const list = h("ul", { class: "rows statements" });
  const empty = h("p", { class: "empty" });
  const text = h("p", { class: "note" });
  const element = section("statements-title", "Slowest running statements", list, empty, text);
  const update = () => {
    const shown = statements();
    setEmpty(empty, isLoaded(), shown.length === 0, "No statement runs now");
    setText(text, note());
    const key = ({ pid, query_start }: StatementRow) => `${node()} ${pid} ${query_start}`;
    reconcile(list, shown, key, createStatement, updateStatement);
  };
  return { element, update };
}

function createStatement(statement: StatementRow): HTMLElement {
  const by = [statement.datname, statement.usename, statement.application_name, statement.client_addr];
  return h(
    "li",
    {},
    h("code", {}, statement.query),
    h(
      "div",
      { class: "about" },
      h("span", { class: "since" }),
      `, ${by.filter((item) => item).join(", ")}, process ${statement.pid}`,
    ),
  );
}

function updateStatement(element: HTMLElement, statement: StatementRow): void {
  const since = statement.query_start === null ? 0 : Date.now() - parseTime(statement.query_start);
  setText(part(element, ".since"), duration(since));
}

/** The newest statements that took longer than `--slow-statement`, of all nodes. */
export function createSlowStatements(model: Model, most: number): Page {
  const list = h("ul", { class: "rows statements slow-statements" });
  const empty = h("p", { class: "empty" });
  const element = section("slow-statements-title", "Slow statements", list, empty);
  const update = () => {
    const shown = model.slowStatements.slice(0, most);
    setEmpty(empty, model.has("slow_statements"), shown.length === 0, "No slow statements");
    reconcile(list, shown, slowKey, createSlowStatement, () => undefined);
  };
  return { element, update };
}

function slowKey(of: SlowStatementRow): string {
  return [of.node, of.time, of.tenant, of.ms, of.rows, of.fingerprint].join(" ");
}

function createSlowStatement(of: SlowStatementRow): HTMLElement {
  const failed = of.sqlstate === null ? "" : `, failed with ${of.sqlstate}`;
  return h(
    "li",
    {},
    h(
      "div",
      { class: "line" },
      h("time", {}, time(of.time)),
      " ",
      h("a", { href: tenantLink(of.tenant) }, of.tenant),
      h("strong", {}, ` ${milliseconds(of.ms)}`),
    ),
    h("code", {}, of.statement),
    h("div", { class: "about" }, `${count(of.rows, "row")}, by ${of.user} at ${of.node}${failed}`),
  );
}
