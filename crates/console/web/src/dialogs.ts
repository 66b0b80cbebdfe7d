// Dialogs that confirm an action, and run it.

import { ApiError, act, type Action } from "./api";
import { announce, focusHeading, h, isFocusable, type Child } from "./dom";
import { time, toTimestamp } from "./format";

export interface Confirmation {
  title: string;
  /** What will happen. */
  body: Child[];
  button: string;
  isDangerous?: boolean;
  /** The action. Null if the form is not complete. */
  action: () => Action | null;
  /** What is announced when the action has ended. */
  done: string;
}

/** Asks for a confirmation, runs the action, and shows its error in the dialog. */
export function confirm({ title, body, button, isDangerous, action, done }: Confirmation): void {
  const problem = h("p", { class: "problem", role: "alert" });
  const submit = h("button", { type: "submit", class: isDangerous ? "danger" : "primary" }, button);
  const cancel = h("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const send = async (event: Event) => {
    event.preventDefault();
    const request = action();
    if (!request) {
      return;
    }
    submit.disabled = true;
    problem.textContent = "";
    try {
      const isRunning = await act(request);
      dialog.close();
      announce(isRunning ? `${title}: still running. The result will be shown here, and is an event.` : done);
    } catch (error) {
      problem.textContent = errorText(error);
      submit.disabled = false;
    }
  };
  const dialog = h(
    "dialog",
    { "aria-labelledby": "dialog-title" },
    h(
      "form",
      { onsubmit: (event) => void send(event) },
      h("h2", { id: "dialog-title" }, title),
      ...body,
      problem,
      h("div", { class: "buttons" }, cancel, submit),
    ),
  );
  const opener = document.activeElement;
  const section = opener?.closest("section") ?? null;
  dialog.addEventListener("close", () => {
    dialog.remove();
    // The action may have hidden or disabled the opener. At a sign-out the section is removed too.
    if (opener instanceof HTMLElement && isFocusable(opener)) {
      opener.focus();
    } else if (section?.isConnected) {
      focusHeading(section);
    }
  });
  document.body.append(dialog);
  dialog.showModal();
}

/** An error in words. */
export function errorText(error: unknown): string {
  if (error instanceof ApiError) {
    return [error.message, error.detail, error.hint].filter((text) => text).join(" ");
  }
  return error instanceof Error ? error.message : String(error);
}

/** Shows the result of an action that ended after its request was answered. */
export function announceResult(result: { token: string; statement: string; error: { message: string } | null }): void {
  const text = `${result.statement} (token ${result.token})`;
  if (result.error) {
    announce(`Failed: ${text}: ${result.error.message}`, true);
  } else {
    announce(`Done: ${text}`);
  }
}

/** A database: its name may be given to another one, its partition is not. */
export interface Target {
  database: string;
  partition: number | undefined;
}

/** Asks for the node to move a tenant to. */
export function moveDialog(target: Target, from: string, nodes: string[]): void {
  const tenant = target.database;
  const select = h(
    "select",
    { id: "destination", required: true },
    ...nodes.map((node) => h("option", { value: node }, node)),
  );
  confirm({
    title: `Move ${tenant}`,
    body: [
      h("p", {}, `The tenant is served by ${from || "no node"} now. Clients stay connected, and wait shortly at the handover.`),
      h("label", { for: "destination" }, "Destination"),
      select,
    ],
    button: "Move",
    action: () => (select.value ? { action: "move", ...target, node: select.value } : null),
    done: `${tenant} was moved.`,
  });
}

/**
 * Asks for the confirmation of a restore, for which the tenant's name must be entered, and for the time
 * if there is none.
 */
export function restoreDialog(target: Target, timestamp: string | null): void {
  const tenant = target.database;
  const input = h("input", { id: "confirm-name", autocomplete: "off", required: true });
  const at = h("input", { id: "restore-time", type: "datetime-local", step: "1", required: true });
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  confirm({
    title: `Restore ${tenant}`,
    body: [
      h("p", {}, `The tenant is restored to ${timestamp === null ? "the time below" : time(timestamp)}. Its sessions are terminated, and later changes disappear. They can be restored as long as their restore points are retained.`),
      timestamp === null && h("label", { for: "restore-time" }, `Time (${zone})`),
      timestamp === null && at,
      h("label", { for: "confirm-name" }, `Enter the tenant's name, ${tenant}, to confirm`),
      input,
    ],
    button: "Restore",
    isDangerous: true,
    action: () => {
      input.setCustomValidity(input.value === tenant ? "" : "This is not the tenant's name.");
      input.addEventListener("input", () => input.setCustomValidity(""), { once: true });
      if (!input.reportValidity()) {
        return null;
      }
      return { action: "restore", ...target, timestamp: timestamp ?? toTimestamp(new Date(at.value)) };
    },
    done: `${tenant} was restored.`,
  });
}
