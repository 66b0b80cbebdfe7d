//! Checks the documentation against the code:
//!
//! - `docs/sql.md` lists exactly the SQLSTATEs in the code.
//! - `docs/operations.md` documents every warning and error log message, every kind of event, and
//!   every SQLSTATE that may need an operator.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the sources of the node and the command, without their unit tests.
fn sources() -> Vec<(PathBuf, String)> {
    fn walk(directory: &Path, found: &mut Vec<(PathBuf, String)>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let code = text.split("#[cfg(test)]").next().unwrap_or_default().to_owned();
                found.push((path, code));
            }
        }
    }
    let mut found = Vec::new();
    // The other crates are only tools: no node runs their code.
    let tools = ["fuzz", "simulation", "workload"].map(|name| workspace().join("crates").join(name));
    let crates = std::fs::read_dir(workspace().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    for path in crates.filter(|path| !tools.contains(path)) {
        walk(&path.join("src"), &mut found);
    }
    found
}

/// Returns the string literals in a piece of code. No literal of interest contains a quote.
fn literals(code: &str) -> impl Iterator<Item = &str> {
    code.split('"').skip(1).step_by(2)
}

/// Returns the arguments of a macro call: the code up to the parenthesis that closes it.
fn arguments(code: &str) -> &str {
    let (mut depth, mut in_literal) = (1, false);
    for (at, character) in code.char_indices() {
        match character {
            '"' => in_literal = !in_literal,
            '(' if !in_literal => depth += 1,
            ')' if !in_literal => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &code[..at];
        }
    }
    code
}

/// Joins a literal that is continued on the next line with a backslash.
fn joined(literal: &str) -> String {
    let mut lines = literal.split("\\\n");
    let first = lines.next().unwrap_or_default().to_owned();
    lines.fold(first, |joined, line| joined + line.trim_start())
}

fn operations() -> String {
    std::fs::read_to_string(workspace().join("docs/operations.md")).unwrap()
}

#[test]
fn every_warning_and_error_message_is_documented() {
    let documented = operations();
    let mut messages = 0;
    for (path, code) in sources() {
        for rest in ["tracing::warn!(", "tracing::error!("].iter().flat_map(|start| code.split(start).skip(1))
        {
            // The last literal is the message.
            let call = arguments(rest);
            let Some(message) = literals(call).last() else { panic!("{}: {call}", path.display()) };
            let message = joined(message);
            assert!(
                documented.contains(&format!("`{message}`")),
                "{}: docs/operations.md does not document \"{message}\"",
                path.display()
            );
            messages += 1;
        }
    }
    assert!(messages >= 90, "only {messages} log messages found: the search no longer matches the code");
}

/// Returns all SQLSTATEs of errors in the code.
fn states() -> BTreeSet<String> {
    let is_state = |text: &&str| {
        let begins = text.starts_with(|first: char| first.is_ascii_digit()) || is_own_class(text);
        begins && text.len() == 5 && text.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit())
    };
    let mut states = BTreeSet::new();
    for (_, code) in sources() {
        states.extend(code.lines().flat_map(literals).filter(is_state).map(str::to_owned));
    }
    states.retain(|state| !["00000", "01000"].contains(&state.as_str())); // success and warning
    assert!(states.len() > 50, "only {} SQLSTATEs found", states.len());
    states
}

/// Returns true for the classes that do not begin with a digit.
fn is_own_class(state: &str) -> bool {
    ["P0", "XX"].iter().any(|class| state.starts_with(class))
}

/// Splits a text into words of letters and digits.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric())
}

#[test]
fn every_sqlstate_for_operators_is_in_the_runbook() {
    let operations = operations();
    let runbook = operations.split("\n## Runbook\n").nth(1).unwrap();
    let first_column = |line: &str| line.split(" | ").next().map(str::to_owned);
    let cells: Vec<String> = runbook.lines().filter_map(first_column).collect();
    let listed: BTreeSet<&str> = cells.iter().flat_map(|cell| words(cell)).collect();
    // Connections, resources, operator intervention, system errors and internal errors.
    let is_for_operators =
        |state: &&String| ["08006", "53", "57", "58", "XX"].iter().any(|class| state.starts_with(class));
    for state in states().iter().filter(is_for_operators) {
        assert!(listed.contains(state.as_str()), "the runbook does not list SQLSTATE {state}");
    }
}

#[test]
fn sql_reference_lists_exactly_the_sqlstates_in_the_code() {
    let sql = std::fs::read_to_string(workspace().join("docs/sql.md")).unwrap();
    let section = sql.split("\n## Errors\n").nth(1).and_then(|rest| rest.split("\n## ").next()).unwrap();
    // An item of the list is `- STATE, STATE: conditions`.
    let states_of = |line: &str| line.strip_prefix("- ")?.split(": ").next().map(str::to_owned);
    let items: Vec<String> = section.lines().filter_map(states_of).collect();
    let listed: BTreeSet<String> = items
        .iter()
        .flat_map(|item| words(item))
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
        .collect();
    assert_eq!(listed, states());
}

#[test]
fn every_kind_of_event_is_documented() {
    let documented = operations();
    for kind in fulmar_gateway::events::Kind::ALL {
        let name = kind.name();
        assert!(documented.contains(&format!("`{name}`")), "docs/operations.md does not document {name}");
    }
}
