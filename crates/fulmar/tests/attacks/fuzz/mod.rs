//! Fuzz test with random nested SQL programs, against a node with the smallest stack. The node must
//! not exit, must stay within its memory limit, and must serve the neighbour.
//!
//! A program ([`grammar`]) is a few statements in one transaction, which is rolled back. It depends
//! only on the seed and its number.
//!
//! - `make test` runs [`PROGRAMS`] programs with a fixed seed.
//! - `make fuzz MINUTES=60 TARGET=sql` runs for 60 minutes with a random seed, or with `FUZZ_SEED`.
//! - A failing program is written to `target/fuzz/sql/`. When the bug is fixed, move the file to
//!   `crates/fulmar/tests/fuzz/sql/`: every run starts with the programs there.

mod grammar;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio_postgres::Client;

use crate::client::{Response, answer_within};
use crate::test_bench::{OWNER, READER, TestBench, with_smallest_stack};
use grammar::{Function, Grammar};

/// Number of programs in `make test`.
const PROGRAMS: u64 = 150;
const FIXED_SEED: u64 = 7;
const SET_TIMEOUT: &str = "SET statement_timeout = 250";
/// Timeout for the response to a statement, which the statement timeout ends.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(120);
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// Separates the statements of a program in its file.
const SEPARATOR: &str = "\n--\n";
/// Maximum number of characters of a program in a message.
const MAX_SHOWN_CHARS: usize = 2000;

/// Minimum share of the programs' statements that succeed. With fewer, the run tests little more
/// than the parser.
const MIN_SUCCESS_SHARE: f64 = 0.1;
/// Responses to statements that are too deep, too large or too slow.
const LIMITS: [&str; 5] = ["54000", "54001", "53200", "53400", "57014"];

/// Responses that no statement may get: they are bugs of the node.
const FAULTS: [&str; 5] = ["XX000", "XX001", "XX002", "58030", "nothing"];

#[tokio::test(flavor = "multi_thread")]
async fn fuzz_sql() {
    let minutes = setting("FUZZ_MINUTES");
    let seed = setting("FUZZ_SEED").unwrap_or(if minutes.is_some() { rand::random() } else { FIXED_SEED });
    let arena = TestBench::new("fuzz", grammar::SCHEMA).await;
    let mut run = Run {
        arena: arena.configured(with_smallest_stack),
        sessions: None,
        answers: std::collections::BTreeMap::new(),
    };
    for file in regression_programs() {
        let program = std::fs::read_to_string(&file).unwrap();
        run.program(
            &file.display().to_string(),
            &program.split(SEPARATOR).map(str::to_owned).collect::<Vec<_>>(),
        )
        .await;
    }
    let grammar = Grammar::new(functions(&run.arena.target().await.log_in(OWNER).await.unwrap()).await);
    let began = Instant::now();
    let mut progress = PROGRESS_INTERVAL;
    let is_over = |number: u64| match minutes {
        Some(minutes) => began.elapsed() >= Duration::from_secs(minutes * 60),
        None => number >= PROGRAMS,
    };
    for number in (0..).take_while(|number| !is_over(*number)) {
        let program = grammar.program(&mut StdRng::seed_from_u64(seed ^ (number << 32)));
        run.program(&format!("seed-{seed}-{number}"), &program).await;
        if began.elapsed() >= progress {
            progress += PROGRESS_INTERVAL;
            println!("fuzz sql: {} s, {number} programs, seed {seed}", began.elapsed().as_secs());
        }
    }
    println!("fuzz sql: answers {:?}, seed {seed}", run.answers);
    run.assert_variety();
}

fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Returns the files of programs that have failed before, ordered by name.
fn regression_programs() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/sql");
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Returns all functions that SQL can call.
async fn functions(session: &Client) -> Vec<Function> {
    let sql = "SELECT DISTINCT name, CAST(narg AS INTEGER) FROM pragma_function_list ORDER BY 1, 2";
    let rows = session.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| Function { name: row.get(0), arguments: row.get(1) }).collect()
}

struct Run {
    arena: TestBench,
    /// The sessions of the owner and of the read-only user.
    sessions: Option<[Client; 2]>,
    /// Number of statements of programs for each SQLSTATE in the response.
    answers: std::collections::BTreeMap<String, u64>,
}

impl Run {
    /// Runs a program. Panics if the node violates a requirement.
    async fn program(&mut self, name: &str, statements: &[String]) {
        let mut violations = Vec::new();
        for (user, begin) in [(0, "BEGIN"), (1, "BEGIN READ ONLY")] {
            match self.transaction(user, begin, statements).await {
                Response::Error(state, message) if FAULTS.contains(&state.as_str()) => {
                    violations.push(format!("{state} {message}"));
                }
                Response::Timeout(_) => {
                    violations.push("no response to a statement".to_owned());
                    break;
                }
                Response::Closed(_) => self.sessions = None,
                _ => {}
            }
        }
        violations.extend(self.arena.violations().await);
        if !violations.is_empty() {
            let file = save(name, statements);
            let text: String = statements.join(SEPARATOR).chars().take(MAX_SHOWN_CHARS).collect();
            panic!(
                "fuzz sql: program {name}: {}\n{text}\nthe whole program is in {}",
                violations.join("; "),
                file.display()
            );
        }
    }

    /// Runs statements until one fails. The session is reused unless the node has closed it.
    async fn transaction(&mut self, user: usize, begin: &str, statements: &[String]) -> Response {
        if self.sessions.is_none() {
            let target = self.arena.target().await;
            let sessions = [target.log_in(OWNER).await, target.log_in(READER).await];
            let sessions = sessions.map(|session| session.unwrap());
            for session in &sessions {
                session.batch_execute(SET_TIMEOUT).await.unwrap();
            }
            self.sessions = Some(sessions);
        }
        let Some(sessions) = &self.sessions else { unreachable!("the sessions were opened above") };
        let mut answer = answer_within(RESPONSE_TIMEOUT, sessions[user].simple_query(begin)).await;
        for statement in statements {
            if answer != Response::Success {
                break;
            }
            answer = answer_within(RESPONSE_TIMEOUT, sessions[user].simple_query(statement)).await;
            *self.answers.entry(answer.state().to_owned()).or_default() += 1;
        }
        if matches!(answer, Response::Timeout(_)) {
            return answer;
        }
        match answer_within(RESPONSE_TIMEOUT, sessions[user].batch_execute("ROLLBACK")).await {
            Response::Success => answer,
            error => error,
        }
    }

    /// Checks that the programs have tested more than the parser.
    fn assert_variety(&self) {
        let count = |state: &str| self.answers.get(state).copied().unwrap_or(0) as f64;
        let total = self.answers.values().sum::<u64>() as f64;
        let answers = &self.answers;
        assert!(count("00000") >= MIN_SUCCESS_SHARE * total, "few statements succeed: {answers:?}");
        assert!(LIMITS.iter().any(|state| count(state) > 0.0), "no statement reaches a limit: {answers:?}");
    }
}

/// Writes a failing program to a file in `target`.
fn save(name: &str, statements: &[String]) -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/fuzz/sql");
    std::fs::create_dir_all(&directory).unwrap();
    let name = Path::new(name).file_stem().unwrap_or_default();
    let file = directory.join(name).with_extension("sql");
    std::fs::write(&file, statements.join(SEPARATOR)).unwrap();
    file
}
