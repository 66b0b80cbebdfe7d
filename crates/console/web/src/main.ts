// The frame of the page: sign-in, navigation, and the stream that updates everything.

import { ApiError, check, get, rows, setToken, stream, token, type Table } from "./api";
import { announceResult, errorText } from "./dialogs";
import { announce, fill, h, reconcile, setAttribute, setText } from "./dom";
import { count, duration, short, time } from "./format";
import { tenantLink, type Page } from "./map";
import { Model, level } from "./model";
import { activityPage, controllerPage, overviewPage, tenantsPage } from "./pages";
import { tenantPage } from "./tenant";

const PAGES: [string, string, (model: Model) => Page][] = [
  ["#/", "Cluster", overviewPage],
  ["#/tenants", "Tenants", tenantsPage],
  ["#/controller", "Controller", controllerPage],
  ["#/activity", "Activity", activityPage],
];
/** The node sends at most this many tenants. */
const MAX_KNOWN = 1000;
/** The page states the age of data that are older. */
const OLD_MS = 10_000;
/** The wait before the stream is opened again. */
const RETRY_MS = [500, 1000, 2000, 5000];

const app = document.getElementById("app") as HTMLElement;

function signIn(message = ""): void {
  const input = h("input", {
    id: "token",
    type: "password",
    name: "token",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    "aria-describedby": "token-help token-problem",
  });
  const problem = h("p", { class: "problem", id: "token-problem", role: "alert" }, message);
  const button = h("button", { type: "submit", class: "primary" }, "Sign in");
  const submit = async (event: Event) => {
    event.preventDefault();
    const secret = input.value.trim();
    button.disabled = true;
    setText(problem, "");
    try {
      await check(secret);
      setToken(secret);
      start();
    } catch (error) {
      button.disabled = false;
      input.setAttribute("aria-invalid", "true");
      setText(problem, errorText(error));
      input.focus();
    }
  };
  fill(
    app,
    h(
      "main",
      { class: "sign-in" },
      h("h1", {}, "Fulmar console"),
      h(
        "form",
        { onsubmit: (event) => void submit(event) },
        h("label", { for: "token" }, "Admin token"),
        input,
        h("p", { id: "token-help", class: "note" }, "A superuser creates one with ", h("code", {}, "fulmar token create NAME --admin"), ". It is kept until this tab is closed."),
        problem,
        button,
      ),
    ),
  );
  input.focus();
}

/** The parts of the page that are always there. */
function createFrame(state: HTMLElement, signal: AbortSignal, signOut: () => void) {
  const nav = h("nav", { "aria-label": "Pages" }, ...PAGES.map(([href, title]) => h("a", { href }, title)));
  const summary = h("p", { class: "summary" }, "Loading…");
  const problem = h("p", { class: "problem banner", role: "alert" });
  const main = h("main", { id: "main", tabindex: -1 });
  fill(
    app,
    h("a", { class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); main.focus(); } }, "Skip to the content"),
    h(
      "header",
      {},
      h("span", { class: "brand" }, "Fulmar"),
      nav,
      search(signal),
      h("span", { class: "spacer" }),
      state,
      h("button", { class: "small", onclick: signOut }, "Sign out"),
    ),
    summary,
    problem,
    main,
  );
  return { nav, summary, problem, main };
}

/** When the node has read its data, in milliseconds since 1970, and the age of that. */
interface Reading {
  at_ms: number;
  age_ms: number;
}

/** Shows whether the stream is open, and when the data were read if that was a while ago. */
function createState(signal: AbortSignal) {
  const element = h("span", { class: "stream-state", role: "status" }, "Connecting…");
  let isOpen = false;
  let read: { at: number; began: number } | null = null;
  const update = () => {
    const age = read === null ? 0 : performance.now() - read.began;
    const isOld = age > OLD_MS;
    const live = read === null ? "Connecting…" : isOld ? "" : "Live";
    const texts = [isOpen ? live : "Reconnecting…"];
    if (read !== null && isOld) {
      // In steps of 10 s, because screen readers read each change.
      texts.push(`Data of ${time(read.at)} (${duration(Math.floor(age / 10_000) * 10_000)} old)`);
    }
    setText(element, texts.join(" ").trim());
    element.classList.toggle("bad", isOld || !isOpen);
  };
  const timer = window.setInterval(() => {
    if (read !== null) {
      update();
    }
  }, 1000);
  signal.addEventListener("abort", () => window.clearInterval(timer));
  return {
    element,
    setOpen(open: boolean) {
      isOpen = open;
      update();
    },
    setRead({ at_ms, age_ms }: Reading) {
      read = { at: at_ms, began: performance.now() - age_ms };
      update();
    },
  };
}

/** Shows the page that the address names. */
function createRouter(model: Model, nav: HTMLElement, main: HTMLElement, signal: AbortSignal) {
  let page: Page | null = null;
  const open = (isNavigation: boolean) => {
    const hash = location.hash || "#/";
    page?.close?.();
    const tenant = /^#\/tenant\/(.+)$/.exec(hash)?.[1];
    const found = PAGES.find(([href]) => href === hash) ?? PAGES[0];
    page = tenant !== undefined ? tenantPage(model, decode(tenant)) : (found?.[2](model) ?? null);
    document.title = `${tenant !== undefined ? decode(tenant) : (found?.[1] ?? "")} – Fulmar console`;
    for (const link of nav.querySelectorAll("a")) {
      setAttribute(link, "aria-current", tenant === undefined && link.getAttribute("href") === found?.[0] ? "page" : null);
    }
    if (page) {
      main.replaceChildren(page.element);
      page.update();
      if (isNavigation) {
        window.scrollTo(0, 0);
        page.element.querySelector<HTMLElement>("h1")?.focus({ preventScroll: true });
      }
    }
  };
  window.addEventListener("hashchange", () => open(true), { signal });
  open(false);
  return {
    update: () => page?.update(),
    close: () => {
      page?.close?.();
      page = null;
    },
  };
}

function start(): void {
  const model = new Model();
  const ending = new AbortController();
  const signOut = (message = "") => {
    // The stream may report its end after the operator has signed out, and in again.
    if (ending.signal.aborted) {
      return;
    }
    ending.abort();
    router.close();
    document.querySelectorAll("dialog").forEach((dialog) => dialog.close());
    setToken(null);
    signIn(message);
  };
  const state = createState(ending.signal);
  const { nav, summary, problem, main } = createFrame(state.element, ending.signal, () => signOut());
  const router = createRouter(model, nav, main, ending.signal);

  window.addEventListener("pagehide", () => ending.abort(), { signal: ending.signal });

  let streamProblem = "";
  let isScheduled = false;
  const schedule = () => {
    if (!isScheduled && !ending.signal.aborted) {
      isScheduled = true;
      requestAnimationFrame(() => {
        isScheduled = false;
        updateSummary(summary, model);
        setText(problem, streamProblem || (model.error ?? ""));
        router.update();
      });
    }
  };
  const ended = new Set<string>();
  const handler = {
    event(name: string, data: unknown) {
      if (name === "end") {
        signOut((data as { message?: string }).message ?? "");
      } else if (name === "read") {
        state.setRead(data as Reading);
      } else if (name === "action") {
        announceResult(data as Parameters<typeof announceResult>[0]);
      } else {
        model.set(name, data);
        if (name === "moves") {
          announceMoves(model, ended);
        }
        schedule();
      }
    },
    alive() {
      state.setOpen(true);
      if (streamProblem !== "") {
        streamProblem = "";
        schedule();
      }
    },
  };
  void follow(handler, ending.signal, (text) => {
    state.setOpen(false);
    streamProblem = text;
    schedule();
  }).catch((error: unknown) => signOut(errorText(error)));
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Reads streams until the operator signs out or the token is refused. Reports why a stream ended. */
async function follow(
  handler: Parameters<typeof stream>[0],
  signal: AbortSignal,
  report: (problem: string) => void,
): Promise<void> {
  for (let failures = 0; !signal.aborted; failures += 1) {
    const alive = () => {
      failures = 0;
      handler.alive();
    };
    let problem = "";
    try {
      await stream({ ...handler, alive }, signal);
    } catch (error) {
      if (error instanceof ApiError && error.isRefused) {
        throw error;
      }
      // The node has refused the stream, for example because too many consoles are open.
      problem = error instanceof ApiError && error.status > 0 ? errorText(error) : "";
    }
    if (!signal.aborted) {
      report(problem);
      const wait = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)] ?? 5000;
      await new Promise((resolve) => window.setTimeout(resolve, wait));
    }
  }
}

function updateSummary(summary: HTMLElement, model: Model): void {
  if (!["nodes", "node_load", "tenants"].every((section) => model.has(section))) {
    setText(summary, "Loading…");
    return;
  }
  const nodes = model.allNodes();
  const alive = nodes.filter((node) => node.state === "alive").length;
  const tenants = model.tenants();
  const over = tenants.filter((tenant) => level(tenant) === "over").length;
  const requests = [...model.nodeLoad.values()].reduce((sum, load) => sum + (load.requests_per_s ?? 0), 0);
  // The page does not know all tenants of a large cluster.
  const partitions = tenants.length < MAX_KNOWN ? 0 : nodes.reduce((sum, node) => sum + node.partitions, 0);
  const parts = [
    alive === nodes.length ? count(alive, "node") : `${alive} of ${count(nodes.length, "node")} alive`,
    count(Math.max(tenants.length, partitions), "tenant"),
    `${short(requests)} requests/s`,
    over === 0 ? "none over its objective" : `▲ ${count(over, "tenant")} over the objective`,
    count(model.runningMoves().length, "move") + " in progress",
  ];
  if (model.isCluster) {
    parts.push(`controller ${model.control.get("mode") ?? "–"}`);
  }
  setText(summary, parts.join(" · "));
}

/** Announces moves that have ended since the last time. */
function announceMoves(model: Model, ended: Set<string>): void {
  const isFirst = ended.size === 0;
  const texts: string[] = [];
  for (const move of model.endedMoves()) {
    const key = `${move.partition} ${move.number}`;
    if (!ended.has(key)) {
      texts.push(`${move.tenant ?? "A tenant"} was ${move.step} to ${move.destination}.`);
      ended.add(key);
    }
  }
  ended.add("");
  if (!isFirst && texts.length > 0) {
    announce(texts.join(" "));
  }
}

/** Finds tenants by the beginning of their names. */
function search(signal: AbortSignal): HTMLElement {
  const options = h("datalist", { id: "found" });
  const input = h("input", {
    id: "search",
    type: "search",
    list: "found",
    placeholder: "Find a tenant",
    "aria-label": "Find a tenant",
    autocomplete: "off",
    spellcheck: "false",
  });
  let timer = 0;
  const find = async () => {
    const prefix = input.value.trim();
    if (prefix === "" || signal.aborted) {
      return;
    }
    try {
      const found = rows<{ tenant: string }>(await get<Table>(`search/${encodeURIComponent(prefix)}`, signal));
      reconcile(options, found, (row) => row.tenant, (row) => h("option", { value: row.tenant }), () => undefined);
    } catch (error) {
      if (!signal.aborted) {
        announce(errorText(error), true);
      }
    }
  };
  input.addEventListener("input", () => {
    window.clearTimeout(timer);
    timer = window.setTimeout(() => void find(), 250);
  });
  const submit = (event: Event) => {
    event.preventDefault();
    if (input.value.trim() !== "") {
      location.hash = tenantLink(input.value.trim());
    }
  };
  return h("form", { class: "search", role: "search", onsubmit: submit }, input, options);
}

// The browser may keep a page that was left, and would keep its stream, which counts at the node.
window.addEventListener("pageshow", (event) => {
  if (event.persisted) {
    location.reload();
  }
});

if (token() === null) {
  signIn();
} else {
  start();
}
