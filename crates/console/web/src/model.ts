// What the page knows: the newest sections of the stream, and the history that it has collected.

import { rows, type Table } from "./api";
import { limitMs, parseTime } from "./format";

export interface NodeRow {
  id: number;
  name: string;
  state: string;
  sql: string;
  partitions: number;
  heard_ms: number | null;
  is_this: boolean;
  slow: string | null;
  site: string;
  rack: string;
}

export interface NodeLoad {
  node: string;
  at: string | null;
  capacity: number | null;
  cpu: number | null;
  memory_bytes: number | null;
  used_memory_bytes: number | null;
  written_bytes_per_s: number | null;
  requests_per_s: number | null;
  error: string | null;
}

export interface TenantLoad {
  node: string;
  tenant: string;
  cpu: number;
  requests_per_s: number;
  errors_per_s: number;
  size_bytes: number;
  memory_bytes: number;
  latency_ms: number | null;
  p50_ms: number | null;
  p95_ms: number | null;
  p99_ms: number | null;
}

export interface MoveRow {
  partition: number;
  tenant: string | null;
  number: number;
  mechanism: string;
  source: string;
  destination: string;
  step: string;
  started: string;
  rounds: number;
  bytes: number;
  expected_bytes: number;
  total_ms: number;
  pause_ms: number;
  expected_pause_ms: number;
  failed: number;
  error: string | null;
}

export interface DecisionRow {
  number: number;
  time: string;
  controller: string;
  mode: string;
  action: string;
  what: string;
  why: string;
  predicted: string;
  outcome: string | null;
  ended: string | null;
}

export interface EventRow {
  id: number;
  time: string;
  kind: string;
  severity: string;
  database: string | null;
  user: string | null;
  text: string;
  details: Record<string, unknown> | null;
}

export interface StatementRow {
  pid: number;
  datname?: string;
  usename: string;
  application_name: string;
  client_addr: string | null;
  query_start: string | null;
  query: string;
}

export interface SlowStatementRow {
  node: string;
  time: string;
  tenant: string;
  user: string;
  ms: number;
  rows: number;
  sqlstate: string | null;
  fingerprint: string;
  statement: string;
}

/** What a node has counted of the statements with one text. */
export interface TopStatementRow {
  node: string;
  fingerprint: string;
  statement: string;
  calls: number;
  total_ms: number;
  mean_ms: number;
  max_ms: number;
  rows: number;
  errors: number;
}

export interface ForecastRow {
  series: string;
  name: string;
  method: string;
  at: string;
  load: number | null;
  forecast: number | null;
}

/** A tenant on the map: what is known of its load, or nothing if it is idle. */
export interface Tenant {
  name: string;
  node: string;
  objectiveMs: number | null;
  load: TenantLoad | null;
}

/** Latency against the objective. */
export type Level = "over" | "near" | "within" | "none" | "idle";

export const LEVELS: Record<Level, { mark: string; text: string }> = {
  within: { mark: "●", text: "within its objective" },
  near: { mark: "◆", text: "above 70 % of its objective" },
  over: { mark: "▲", text: "over its objective" },
  none: { mark: "○", text: "active, without an objective" },
  idle: { mark: "·", text: "idle" },
};

const NEAR = 0.7;

export function level(tenant: Tenant): Level {
  const { load, objectiveMs } = tenant;
  if (!load || load.requests_per_s === 0) {
    return "idle";
  }
  if (objectiveMs === null || load.latency_ms === null) {
    return "none";
  }
  const share = load.latency_ms / objectiveMs;
  return share > 1 ? "over" : share > NEAR ? "near" : "within";
}

/** A value of a chart. The line has a gap at null, and continues across undefined. */
export type Sample = number | null | undefined;

/** One value per second of what a chart shows. */
export interface History {
  at: number[];
  values: Record<string, Sample[]>;
}

/** The history of a tenant. */
interface TenantHistory extends History {
  /** When the tenant was last in the section, in seconds. */
  seen: number;
}

const MAX_HISTORY = 900;
const MAX_TENANT_HISTORY = 300;
const MAX_TENANT_HISTORIES = 1000;
/** A history is deleted if the tenant was absent for this time. */
const MAX_ABSENCE_S = 300;

/** Adds a sample. Lines without a value have a gap. */
function remember(history: History, at: number, values: Record<string, Sample>, most: number): void {
  history.at.push(at);
  for (const [name, value] of Object.entries(values)) {
    (history.values[name] ??= Array<null>(history.at.length - 1).fill(null)).push(value);
  }
  for (const column of Object.values(history.values)) {
    while (column.length < history.at.length) {
      column.push(null);
    }
  }
  if (history.at.length > most) {
    history.at.shift();
    Object.values(history.values).forEach((column) => column.shift());
  }
}

const TERMINAL = new Set(["moved", "undone", "cancelled"]);

export class Model {
  nodes: NodeRow[] = [];
  nodeLoad = new Map<string, NodeLoad>();
  loads: TenantLoad[] = [];
  moves: MoveRow[] = [];
  decisions: DecisionRow[] = [];
  events: EventRow[] = [];
  statements: StatementRow[] = [];
  slowStatements: SlowStatementRow[] = [];
  forecast: ForecastRow[] = [];
  control = new Map<string, string>();
  /** Why the node cannot be read at the moment. */
  error: string | null = null;
  /** The sections that have arrived. */
  private readonly arrived = new Set<string>();
  /** CPUs in use per node, their sum as "cluster", and the sum of capacities as "capacity". */
  readonly history: History = { at: [], values: {} };
  readonly tenantHistory = new Map<string, TenantHistory>();
  private placements = new Map<string, { node: string | null; objective: string | null }>();

  /** Whether a section has arrived. Until then its rows are not known. */
  has(section: string): boolean {
    return this.arrived.has(section);
  }

  /** Takes over a section of the stream. */
  set(name: string, data: unknown): void {
    const table = data as Table | null;
    switch (name) {
      case "nodes":
        this.nodes = rows<NodeRow>(table);
        break;
      case "node_load":
        this.setNodeLoad(rows<NodeLoad>(table));
        break;
      case "tenants":
        this.setTenants(rows<TenantLoad>(table));
        break;
      case "moves":
        this.moves = rows<MoveRow>(table);
        break;
      case "decisions":
        this.decisions = rows<DecisionRow>(table);
        break;
      case "events":
        this.events = rows<EventRow>(table);
        break;
      case "statements":
        this.statements = rows<StatementRow>(table);
        break;
      case "slow_statements":
        this.slowStatements = rows<SlowStatementRow>(table);
        break;
      case "forecast":
        this.forecast = rows<ForecastRow>(table);
        break;
      case "control":
        this.control = new Map(rows<{ name: string; value: string }>(table).map((row) => [row.name, row.value]));
        break;
      case "placements":
        this.placements = new Map(
          rows<{ tenant: string; node: string | null; objective: string | null }>(table).map((row) => [row.tenant, row]),
        );
        break;
      case "error":
        this.error = (data as { message: string } | null)?.message ?? null;
        break;
    }
    this.arrived.add(name);
  }

  private setNodeLoad(loads: NodeLoad[]): void {
    this.nodeLoad = new Map(loads.map((load) => [load.node, load]));
    const values: Record<string, number | null> = { cluster: 0, capacity: 0 };
    for (const load of loads) {
      values[`node ${load.node}`] = load.cpu;
      values["cluster"] = (values["cluster"] ?? 0) + (load.cpu ?? 0);
      values["capacity"] = (values["capacity"] ?? 0) + (load.capacity ?? 0);
    }
    const times = loads.map((load) => (load.at ? parseTime(load.at) : 0));
    const at = Math.max(0, ...times) / 1000;
    if (at > (this.history.at.at(-1) ?? 0)) {
      remember(this.history, at, values, MAX_HISTORY);
    }
  }

  private setTenants(loads: TenantLoad[]): void {
    this.loads = loads;
    const now = Date.now() / 1000;
    for (const { tenant, latency_ms, p99_ms, requests_per_s, cpu } of loads) {
      const history: TenantHistory = this.tenantHistory.get(tenant) ?? { at: [], values: {}, seen: now };
      history.seen = now;
      // A second without statements has no latency, and is no gap.
      const latencies = { latency_ms: latency_ms ?? undefined, p99_ms: p99_ms ?? undefined };
      remember(history, now, { ...latencies, requests_per_s, cpu }, MAX_TENANT_HISTORY);
      // The map keeps the order in which the tenants were last seen.
      this.tenantHistory.delete(tenant);
      this.tenantHistory.set(tenant, history);
    }
    for (const [tenant, history] of this.tenantHistory) {
      if (now - history.seen > MAX_ABSENCE_S || this.tenantHistory.size > MAX_TENANT_HISTORIES) {
        this.tenantHistory.delete(tenant);
      } else if (history.seen < now) {
        remember(history, now, {}, MAX_TENANT_HISTORY);
      }
    }
  }

  /** All nodes: those of the cluster, or the only one. */
  allNodes(): NodeRow[] {
    if (this.nodes.length > 0) {
      return this.nodes;
    }
    const single = { id: 0, sql: "", partitions: 0, heard_ms: null, slow: null, site: "", rack: "" };
    return [...this.nodeLoad.keys()].map((name) => ({ ...single, name, state: "alive", is_this: true }));
  }

  /** The node that owns the database `fulmar`. Events and running statements are those of this node. */
  get thisNode(): string {
    return this.allNodes().find((node) => node.is_this)?.name ?? "";
  }

  /** All tenants that are known: those with load, and idle ones. */
  tenants(): Tenant[] {
    const tenants = new Map<string, Tenant>();
    for (const load of this.loads) {
      if (load.tenant !== "fulmar") {
        const objectiveMs = limitMs(this.placements.get(load.tenant)?.objective);
        tenants.set(load.tenant, { name: load.tenant, node: load.node, objectiveMs, load });
      }
    }
    for (const [name, { node, objective }] of this.placements) {
      const known = tenants.get(name);
      if (known) {
        known.node = node ?? known.node;
      } else {
        tenants.set(name, { name, node: node ?? this.thisNode, objectiveMs: limitMs(objective), load: null });
      }
    }
    return [...tenants.values()];
  }

  tenant(name: string): Tenant | null {
    return this.tenants().find((tenant) => tenant.name === name) ?? null;
  }

  runningMoves(): MoveRow[] {
    return this.moves.filter((move) => !TERMINAL.has(move.step));
  }

  endedMoves(): MoveRow[] {
    return this.moves.filter((move) => TERMINAL.has(move.step));
  }

  /** A list that the controller shows as text. */
  listed(name: string): string[] {
    return (this.control.get(name) ?? "").split(", ").filter((item) => item !== "");
  }

  get isCluster(): boolean {
    return this.nodes.length > 0;
  }
}
