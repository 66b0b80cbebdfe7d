//! `docs/operations.md` has a remedy for every alarm and every SQLSTATE that the code can raise, and says what every event is;
//! `docs/sql.md` lists the SQLSTATEs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All sources that end up in the node or the command, without their tests.
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
    for room in ["pages", "store", "engine", "meta", "gateway", "fulmar"] {
        walk(&workspace().join("crates").join(room).join("src"), &mut found);
    }
    found
}

/// What stands between quotes in a piece of code; no literal of interest has a quote in it.
fn literals(code: &str) -> impl Iterator<Item = &str> {
    code.split('"').skip(1).step_by(2)
}

fn operations() -> String {
    std::fs::read_to_string(workspace().join("docs/operations.md")).unwrap()
}

#[test]
fn every_alarm_has_a_remedy() {
    let documented = operations();
    let mut alarms = 0;
    for (path, code) in sources() {
        for alarm in
            ["tracing::warn!(", "tracing::error!("].iter().flat_map(|start| code.split(start).skip(1))
        {
            let call = alarm.split(");").next().unwrap_or_default().split("),\n").next().unwrap_or_default();
            // Its last literal is the message; a brace may close the match arm that it stands in.
            let Some(message) = literals(call).last() else { panic!("{}: {call}", path.display()) };
            assert!(
                documented.contains(&format!("`{message}`")),
                "{}: \"{message}\" has no remedy",
                path.display()
            );
            alarms += 1;
        }
    }
    assert!(alarms >= 15, "only {alarms} were found: does the code write them in another way now?");
}

/// Every SQLSTATE of an error that the code has, wherever it stands.
fn states() -> BTreeSet<String> {
    let is_state = |text: &&str| {
        let begins = text.starts_with(|first: char| first.is_ascii_digit()) || is_own_class(text);
        begins && text.len() == 5 && text.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit())
    };
    let mut states = BTreeSet::new();
    for (_, code) in sources() {
        states.extend(code.lines().flat_map(literals).filter(is_state).map(str::to_owned));
    }
    states.retain(|state| !["00000", "01000"].contains(&state.as_str())); // no errors
    assert!(states.len() > 50, "only {} were found", states.len());
    states
}

/// The classes that do not begin with a digit.
fn is_own_class(state: &str) -> bool {
    ["P0", "XX"].iter().any(|class| state.starts_with(class))
}

/// The words of a text: letters and digits.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric())
}

#[test]
fn every_sqlstate_has_a_remedy() {
    let documented = operations();
    let words: BTreeSet<&str> = words(&documented).collect();
    for state in states() {
        assert!(words.contains(state.as_str()), "SQLSTATE {state} has no remedy");
    }
}

/// The table of errors in `docs/sql.md` has what clients can be told, all of it and nothing else.
#[test]
fn every_sqlstate_is_in_the_table_of_errors() {
    let sql = std::fs::read_to_string(workspace().join("docs/sql.md")).unwrap();
    let table = sql.split("\n## Errors\n").nth(1).and_then(|rest| rest.split("\n## ").next()).unwrap();
    let first = |line: &str| line.strip_prefix("| ")?.split(" |").next().map(str::to_owned);
    let cells: Vec<String> = table.lines().filter_map(first).collect();
    let listed: BTreeSet<String> =
        cells.iter().flat_map(|cell| words(cell)).filter(|word| word.len() == 5).map(str::to_owned).collect();
    assert_eq!(listed, states());
}

#[test]
fn every_event_is_explained() {
    let documented = operations();
    for kind in fulmar_gateway::events::Kind::ALL {
        assert!(documented.contains(&format!("`{}`", kind.name())), "{}", kind.name());
    }
}
