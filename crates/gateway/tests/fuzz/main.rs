//! What clients may do to a node, at random: conversations of the wire protocol, and procedures in Lua. Whatever they
//! say, no thread of the node panics, its memory stays within bounds, every connection is answered in whole messages
//! and comes to its end, and others are served.

#[path = "../common/mod.rs"]
mod common;
mod conversation;
mod lua;

use std::io;
use std::time::Duration;

use common::{Node, within};
use conversation::Conversation;
use fulmar_fuzz::Target;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

/// What a node in a test may take, all in all.
const RESIDENT_BYTES: usize = 1536 << 20;
/// So long nothing is said by either side; then the client hangs up.
const SILENCE: Duration = Duration::from_millis(24);
/// Inputs that share a database; they fill it.
const INPUTS_PER_DATABASE: u32 = 500;

const TABLES: &str = "CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT, c BYTEA, d TIMESTAMP);
    INSERT INTO t VALUES (1, 'x', x'00ff', '2024-01-02'), (2, NULL, NULL, NULL), (3, 'zzz', x'', 'no date');
    CREATE PROCEDURE p(n INTEGER) RETURNS TABLE (x TEXT) LANGUAGE lua AS $$ return {{tostring(n)}} $$";

/// A node, and a database of it that is made anew from time to time.
struct Served {
    runtime: Runtime,
    node: Node,
    admin: Client,
    inputs: u32,
}

impl Served {
    fn start() -> Served {
        let runtime = Runtime::new().unwrap();
        let (node, admin) = runtime.block_on(async {
            let node = Node::insecure().await;
            let admin = node.client("fulmar").await;
            (node, admin)
        });
        Served { runtime, node, admin, inputs: 0 }
    }

    /// Before each input: there is a database, with tables.
    fn prepare(&mut self) {
        if self.inputs.is_multiple_of(INPUTS_PER_DATABASE) {
            self.runtime.block_on(async {
                self.admin.batch_execute("DROP DATABASE IF EXISTS fuzz WITH (FORCE)").await.unwrap();
                let client = self.node.database("fuzz").await;
                client.batch_execute(TABLES).await.unwrap();
            });
        }
        self.inputs += 1;
    }

    fn stop(self) {
        drop(self.admin);
        self.runtime.block_on(self.node.stop());
    }
}

#[test]
fn fuzz_wire() {
    let mut served = Served::start();
    let locked = served.runtime.block_on(Node::start(|_| ()));
    let target = Target::new("wire", env!("CARGO_MANIFEST_DIR")).seeds(conversation::seeds());
    target.words(conversation::WORDS).longest(400).runs(400).whole_process(RESIDENT_BYTES).run(|input| {
        served.prepare();
        let conversation = Conversation::of(input);
        served.runtime.block_on(async {
            let node = if conversation.locked_out { &locked } else { &served.node };
            let answers = talk(node.port(), &conversation).await.unwrap();
            if conversation.locked_out {
                assert!(!answers.starts_with(b"R\0\0\0\x08\0\0\0\0"), "it was let in");
            }
            check_messages(&answers, conversation.is_plain());
            // Another client is none the worse for it.
            if served.inputs.is_multiple_of(16) {
                let row = served.admin.query_one("SELECT 1", &[]).await.unwrap();
                assert_eq!(row.get::<_, i64>(0), 1);
            }
        });
    });
    served.runtime.block_on(locked.stop());
    served.stop();
}

#[test]
fn fuzz_lua() {
    let mut served = Served::start();
    let mut client: Option<Client> = None;
    let target = Target::new("lua", env!("CARGO_MANIFEST_DIR")).seeds(lua::seeds());
    target.words(lua::WORDS).longest(512).runs(300).whole_process(RESIDENT_BYTES).run(|input| {
        if served.inputs.is_multiple_of(INPUTS_PER_DATABASE) {
            client = None;
        }
        served.prepare();
        let source = lua::procedure(input);
        served.runtime.block_on(async {
            if client.is_none() {
                let new = served.node.client("fuzz").await;
                new.batch_execute("SET statement_timeout = '60ms'").await.unwrap();
                client = Some(new);
            }
            let session = client.as_ref().unwrap();
            let calls = async {
                if session.batch_execute(&source).await.is_err() {
                    return false;
                }
                let simple = session.batch_execute("CALL q(7, 'text', NULL)").await;
                let extended = session.query("CALL q($1, $2, $3)", &[&-1i64, &"x", &0.5f64]).await;
                let failed = [simple.err(), extended.err()];
                failed.iter().flatten().any(|error| error.code() == Some(&SqlState::QUERY_CANCELED))
            };
            let is_cancelled = within("a procedure ends", calls).await;
            // The session continues. On a busy machine a short statement may take long.
            let probe = "BEGIN; SET LOCAL statement_timeout = 0; SELECT count(*) FROM t; COMMIT";
            if let Err(error) = within("a statement ends", session.batch_execute(probe)).await {
                // A call that does not notice its cancel in time costs its session.
                assert!(error.is_closed() && is_cancelled, "{error:?}");
                client = None;
            }
        });
    });
    drop(client);
    served.stop();
}

/// Says all of a conversation and hangs up when the other side has no more to say; what was answered until its end.
async fn talk(port: u16, conversation: &Conversation) -> io::Result<Vec<u8>> {
    let (mut reader, mut writer) = TcpStream::connect(("127.0.0.1", port)).await?.into_split();
    let mut answers = Vec::new();
    for piece in &conversation.pieces {
        // The node may have hung up, and may wait for its answers to be taken.
        let said = async { drop(writer.write_all(piece).await) };
        tokio::pin!(said);
        loop {
            tokio::select! {
                _ = &mut said => break,
                read = read_some(&mut reader, &mut answers) => if read.is_none() { return Ok(answers) },
            }
        }
        if conversation.waits {
            let read = timeout(SILENCE / 8, read_some(&mut reader, &mut answers)).await;
            if read.is_ok_and(|read| read.is_none()) {
                return Ok(answers);
            }
        }
    }
    let silence = if conversation.hurries { Duration::ZERO } else { SILENCE };
    while let Ok(read) = timeout(silence, read_some(&mut reader, &mut answers)).await {
        if read.is_none() {
            return Ok(answers);
        }
    }
    let _ = writer.shutdown().await;
    let ended = async { while read_some(&mut reader, &mut answers).await.is_some() {} };
    within("the node ends a connection whose client has gone", ended).await;
    Ok(answers)
}

/// Reads what is there; nothing at the connection's end.
async fn read_some(reader: &mut OwnedReadHalf, answers: &mut Vec<u8>) -> Option<()> {
    match reader.read_buf(answers).await {
        Ok(0) | Err(_) => None,
        Ok(_) => Some(()),
    }
}

/// Answers are whole messages of kinds that a server may send.
fn check_messages(mut answers: &[u8], plain: bool) {
    if !plain {
        return;
    }
    while let [kind, a, b, c, d, ..] = answers {
        let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
        assert!(b"123ACDEGHIKNRSTVZcdnstv".contains(kind), "a message of kind {}", kind.escape_ascii());
        let message = answers.get(..1 + length);
        // A client that hangs up in the middle of an answer is not told the rest.
        let Some(message) = message else { return };
        assert!(length >= 4);
        answers = &answers[message.len()..];
    }
}
