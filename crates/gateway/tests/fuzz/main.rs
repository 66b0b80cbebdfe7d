//! Fuzzes a node with random wire-protocol conversations and random Lua procedures. For any input,
//! no thread of the node panics, its memory stays bounded, every connection receives only complete
//! messages and is closed, and other clients are served.

#[path = "../common/mod.rs"]
mod common;
mod conversation;
mod lua;

use std::io;
use std::time::Duration;

use common::{Node, with_timeout};
use conversation::Conversation;
use fulmar_fuzz::Target;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::runtime::Runtime;
use tokio::time::timeout;
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

/// Maximum resident memory of a node in a test.
const RESIDENT_BYTES: usize = 1536 << 20;
/// The client disconnects after neither side has sent anything for this time.
const IDLE_TIMEOUT: Duration = Duration::from_millis(24);
/// Number of inputs that share a database.
const INPUTS_PER_DATABASE: u32 = 500;

const TABLES: &str = "CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT, c BYTEA, d TIMESTAMP);
    INSERT INTO t VALUES (1, 'x', x'00ff', '2024-01-02'), (2, NULL, NULL, NULL), (3, 'zzz', x'', 'no date');
    CREATE PROCEDURE p(n INTEGER) RETURNS TABLE (x TEXT) LANGUAGE lua AS $$ return {{tostring(n)}} $$";

/// A node, and a database that is recreated periodically.
struct ServedNode {
    runtime: Runtime,
    node: Node,
    admin: Client,
    inputs: u32,
}

impl ServedNode {
    fn start() -> ServedNode {
        let runtime = Runtime::new().unwrap();
        let (node, admin) = runtime.block_on(async {
            let node = Node::insecure().await;
            let admin = node.client("fulmar").await;
            (node, admin)
        });
        ServedNode { runtime, node, admin, inputs: 0 }
    }

    /// Ensures before each input that the database exists.
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
    let mut server = ServedNode::start();
    let secured = server.runtime.block_on(Node::start(|_| ()));
    let target = Target::new("wire", env!("CARGO_MANIFEST_DIR")).seeds(conversation::seeds());
    target.words(conversation::WORDS).max_length(400).runs(400).whole_process(RESIDENT_BYTES).run(|input| {
        server.prepare();
        let conversation = Conversation::of(input);
        server.runtime.block_on(async {
            let node = if conversation.locked_out { &secured } else { &server.node };
            let answers = run_conversation(node.port(), &conversation).await.unwrap();
            if conversation.locked_out {
                assert!(!answers.starts_with(b"R\0\0\0\x08\0\0\0\0"), "the client must not be authenticated");
            }
            check_messages(&answers, conversation.is_plain());
            // Another client is not affected.
            if server.inputs.is_multiple_of(16) {
                let row = server.admin.query_one("SELECT 1", &[]).await.unwrap();
                assert_eq!(row.get::<_, i64>(0), 1);
            }
        });
    });
    server.runtime.block_on(secured.stop());
    server.stop();
}

#[test]
fn fuzz_lua() {
    let mut server = ServedNode::start();
    let mut client: Option<Client> = None;
    let target = Target::new("lua", env!("CARGO_MANIFEST_DIR")).seeds(lua::seeds());
    target.words(lua::WORDS).max_length(512).runs(300).whole_process(RESIDENT_BYTES).run(|input| {
        if server.inputs.is_multiple_of(INPUTS_PER_DATABASE) {
            client = None;
        }
        server.prepare();
        let source = lua::procedure(input);
        server.runtime.block_on(async {
            if client.is_none() {
                let new = server.node.client("fuzz").await;
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
            let is_cancelled = with_timeout("a procedure ends", calls).await;
            // The session remains usable. On a busy machine a short statement may take long.
            let probe = "BEGIN; SET LOCAL statement_timeout = 0; SELECT count(*) FROM t; COMMIT";
            if let Err(error) = with_timeout("a statement ends", session.batch_execute(probe)).await {
                // A call that does not react to its cancellation in time ends its session.
                assert!(error.is_closed() && is_cancelled, "{error:?}");
                client = None;
            }
        });
    });
    drop(client);
    server.stop();
}

/// Sends a conversation, and disconnects when the server sends nothing more. Returns everything
/// that was received.
async fn run_conversation(port: u16, conversation: &Conversation) -> io::Result<Vec<u8>> {
    let (mut reader, mut writer) = TcpStream::connect(("127.0.0.1", port)).await?.into_split();
    let mut answers = Vec::new();
    for piece in &conversation.pieces {
        // The node may have closed the connection, or may wait for its responses to be read.
        let sending = async { drop(writer.write_all(piece).await) };
        tokio::pin!(sending);
        loop {
            tokio::select! {
                _ = &mut sending => break,
                read = read_some(&mut reader, &mut answers) => if read.is_none() { return Ok(answers) },
            }
        }
        if conversation.waits {
            let read = timeout(IDLE_TIMEOUT / 8, read_some(&mut reader, &mut answers)).await;
            if read.is_ok_and(|read| read.is_none()) {
                return Ok(answers);
            }
        }
    }
    let idle_timeout = if conversation.hurries { Duration::ZERO } else { IDLE_TIMEOUT };
    while let Ok(read) = timeout(idle_timeout, read_some(&mut reader, &mut answers)).await {
        if read.is_none() {
            return Ok(answers);
        }
    }
    let _ = writer.shutdown().await;
    let ended = async { while read_some(&mut reader, &mut answers).await.is_some() {} };
    with_timeout("the node ends a connection whose client has gone", ended).await;
    Ok(answers)
}

/// Reads the available bytes. Returns `None` at the end of the connection.
async fn read_some(reader: &mut OwnedReadHalf, answers: &mut Vec<u8>) -> Option<()> {
    match reader.read_buf(answers).await {
        Ok(0) | Err(_) => None,
        Ok(_) => Some(()),
    }
}

/// Checks that the responses are complete messages of valid kinds.
fn check_messages(mut answers: &[u8], plain: bool) {
    if !plain {
        return;
    }
    while let [kind, a, b, c, d, ..] = answers {
        let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
        assert!(b"123ACDEGHIKNRSTVZcdnstv".contains(kind), "a message of kind {}", kind.escape_ascii());
        let message = answers.get(..1 + length);
        // The last message may be incomplete if the client disconnected.
        let Some(message) = message else { return };
        assert!(length >= 4);
        answers = &answers[message.len()..];
    }
}
