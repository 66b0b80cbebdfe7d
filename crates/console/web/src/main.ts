// The frame of the page: sign-in, navigation, and the stream that updates everything.

import { ApiError, check, get, rows, setToken, stream, token, type Table } from "./api";
import { errorText } from "./dialogs";
import { announce, fill, h, reconcile, setAttribute, setText } from "./dom";
import { count, short } from "./format";
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

function start(): void {
  const model = new Model();
  const ending = new AbortController();
  const signOut = (message = "") => {
    ending.abort();
    setToken(null);
    signIn(message);
  };

  const state = h("span", { class: "stream-state", role: "status" }, "Connecting…");
  const summary = h("p", { class: "summary" });
  const nav = h("nav", { "aria-label": "Pages" }, ...PAGES.map(([href, title]) => h("a", { href }, title)));
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
      search(ending.signal),
      h("span", { class: "spacer" }),
      state,
      h("button", { class: "small", onclick: () => signOut() }, "Sign out"),
    ),
    summary,
    problem,
    main,
  );

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
  window.addEventListener("hashchange", () => open(true), { signal: ending.signal });
  open(false);

  let isScheduled = false;
  const schedule = () => {
    if (!isScheduled && !ending.signal.aborted) {
      isScheduled = true;
      requestAnimationFrame(() => {
        isScheduled = false;
        updateSummary(summary, model);
        setText(problem, model.error ?? "");
        page?.update();
      });
    }
  };
  const ended = new Set<string>();
  const handler = {
    event(name: string, data: unknown) {
      if (name === "end") {
        signOut((data as { message?: string }).message ?? "");
        return;
      }
      model.set(name, data);
      if (name === "moves") {
        announceMoves(model, ended);
      }
      schedule();
    },
    alive() {
      setText(state, "Live");
      state.classList.remove("bad");
    },
  };
  void follow(handler, ending.signal, (text) => {
    setText(state, text);
    state.classList.add("bad");
  }).catch((error: unknown) => signOut(errorText(error)));
}

function decode(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Reads streams until the operator signs out or the token is refused. */
async function follow(
  handler: Parameters<typeof stream>[0],
  signal: AbortSignal,
  report: (state: string) => void,
): Promise<void> {
  for (let failures = 0; !signal.aborted; failures += 1) {
    const alive = () => {
      failures = 0;
      handler.alive();
    };
    try {
      await stream({ ...handler, alive }, signal);
    } catch (error) {
      if (error instanceof ApiError && error.isRefused) {
        throw error;
      }
    }
    if (!signal.aborted) {
      report("Reconnecting…");
      const wait = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)] ?? 5000;
      await new Promise((resolve) => window.setTimeout(resolve, wait));
    }
  }
}

function updateSummary(summary: HTMLElement, model: Model): void {
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
    const key = `${move.tenant} ${move.number}`;
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
      const found = rows<{ tenant: string }>(await get<Table>(`search/${encodeURIComponent(prefix)}`));
      reconcile(options, found, (row) => row.tenant, (row) => h("option", { value: row.tenant }), () => undefined);
    } catch (error) {
      announce(errorText(error));
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

if (token() === null) {
  signIn();
} else {
  start();
}
