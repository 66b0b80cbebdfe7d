//! Programs of nested SQL at random against a real node with the smallest stack: it stays up, within its memory, and serves the neighbour.
//!
//! A program ([`grammar`]) is a few statements of one transaction, which is rolled back. It follows from the seed and its number alone.
//! `make test` runs [`PROGRAMS`] programs of a fixed seed; `make fuzz MINUTES=60 TARGET=sql` runs for that time with a random seed,
//! or with `FUZZ_SEED`. A program that fails is written to `target/fuzz/sql/`. When the fault is mended it is kept in
//! `crates/fulmar/tests/fuzz/sql/`, and every run begins with it.

mod grammar;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio_postgres::Client;

use crate::arena::{Arena, OWNER, READER, with_smallest_stack};
use crate::client::Answer;
use grammar::{Function, Grammar};

/// Programs of a run in `make test`.
const PROGRAMS: u64 = 150;
const FIXED_SEED: u64 = 7;
const TIMEOUT: &str = "SET statement_timeout = 250";
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// Separates the statements of a program in its file.
const SEPARATOR: &str = "\n--\n";
/// Bytes of a program that a message shows.
const SHOWN_BYTES: usize = 2000;

/// No statement may be answered with these: they are faults of the node.
const FAULTS: [&str; 5] = ["XX000", "XX001", "XX002", "58030", "nothing"];

#[tokio::test(flavor = "multi_thread")]
async fn fuzz_sql() {
    let minutes = setting("FUZZ_MINUTES");
    let seed = setting("FUZZ_SEED").unwrap_or(if minutes.is_some() { rand::random() } else { FIXED_SEED });
    let arena = Arena::new("fuzz", grammar::SCHEMA).await;
    let mut run = Run {
        arena: arena.configured(with_smallest_stack),
        sessions: None,
        answers: std::collections::BTreeMap::new(),
    };
    for file in kept() {
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
}

fn setting(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Programs that failed once, in the order of their names.
fn kept() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/sql");
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// All functions that SQL can call.
async fn functions(session: &Client) -> Vec<Function> {
    let sql = "SELECT DISTINCT name, CAST(narg AS INTEGER) FROM pragma_function_list ORDER BY 1, 2";
    let rows = session.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| Function { name: row.get(0), arguments: row.get(1) }).collect()
}

struct Run {
    arena: Arena,
    /// Of the owner and of the user that may only read.
    sessions: Option<[Client; 2]>,
    /// How many statements were answered with each SQLSTATE.
    answers: std::collections::BTreeMap<String, u64>,
}

impl Run {
    /// Runs a program; panics if the node does not bear it.
    async fn program(&mut self, name: &str, statements: &[String]) {
        let mut wrong = Vec::new();
        for (user, begin) in [(0, "BEGIN"), (1, "BEGIN READ ONLY")] {
            match self.transaction(user, begin, statements).await {
                Answer::Error(state, message) if FAULTS.contains(&state.as_str()) => {
                    wrong.push(format!("{state} {message}"));
                }
                Answer::Nothing => {
                    wrong.push("a statement has no answer".to_owned());
                    break;
                }
                Answer::Closed(_) => self.sessions = None,
                _ => {}
            }
        }
        wrong.extend(self.arena.complaints().await);
        if !wrong.is_empty() {
            let file = keep(name, statements);
            let text: String = statements.join(SEPARATOR).chars().take(SHOWN_BYTES).collect();
            panic!(
                "fuzz sql: program {name}: {}\n{text}\nall of it is in {}",
                wrong.join("; "),
                file.display()
            );
        }
    }

    /// Runs statements until one fails. The session is reused unless the node has ended it.
    async fn transaction(&mut self, user: usize, begin: &str, statements: &[String]) -> Answer {
        if self.sessions.is_none() {
            let target = self.arena.target().await;
            let sessions = [target.log_in(OWNER).await, target.log_in(READER).await];
            let sessions = sessions.map(|session| session.unwrap());
            for session in &sessions {
                session.batch_execute(TIMEOUT).await.unwrap();
            }
            self.sessions = Some(sessions);
        }
        let Some(sessions) = &self.sessions else { unreachable!("the sessions were opened above") };
        let mut answer = Answer::Done;
        for statement in std::iter::once(begin).chain(statements.iter().map(String::as_str)) {
            answer = crate::client::answer(sessions[user].simple_query(statement)).await;
            *self.answers.entry(answer.state().to_owned()).or_default() += 1;
            if answer != Answer::Done {
                break;
            }
        }
        if answer == Answer::Nothing {
            return answer;
        }
        match crate::client::answer(sessions[user].batch_execute("ROLLBACK")).await {
            Answer::Done => answer,
            ended => ended,
        }
    }
}

/// Writes a program to a file that stays.
fn keep(name: &str, statements: &[String]) -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/fuzz/sql");
    std::fs::create_dir_all(&directory).unwrap();
    let name = Path::new(name).file_stem().unwrap_or_default();
    let file = directory.join(name).with_extension("sql");
    std::fs::write(&file, statements.join(SEPARATOR)).unwrap();
    file
}
