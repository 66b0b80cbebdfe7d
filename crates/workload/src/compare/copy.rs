//! `copy-in`: one million rows of 1 KB through COPY, from the command to its response.

use std::time::Instant;

use super::cases::case;
use super::result::CaseResult;
use super::rounds::Bench;
use crate::client::Client;
use crate::server::Server;
use crate::tenants;

const DATABASE: &str = "copies";
/// Approximate length of a row's text.
const ROW_BYTES: usize = 1000;
/// Approximate length of a CopyData message.
const MESSAGE_BYTES: usize = 64 << 10;

const CREATE: &str =
    "CREATE TABLE rows (id INTEGER PRIMARY KEY, number INTEGER, short VARCHAR(100), long VARCHAR(1000))";

pub(super) async fn measure(bench: &Bench) -> anyhow::Result<Vec<CaseResult>> {
    let mut pair = bench.pair(1).await?;
    pair.each(async |server| tenants::create(&server.target(), &[DATABASE.to_owned()], |_| ()).await).await?;
    let measured = bench.alternate(&mut pair, [case("copy-in")], async |server| {
        let took = load(server, bench.sizes.copy_rows).await?;
        Ok([f64::from(bench.sizes.copy_rows) / took])
    });
    Ok(measured.await.into())
}

/// Fills an empty table and returns the seconds that it took.
async fn load(server: &Server, rows: u32) -> anyhow::Result<f64> {
    let mut client = Client::connect(&server.target().with_database(DATABASE)).await?;
    client.query("DROP TABLE IF EXISTS rows").await?;
    client.query(CREATE).await?;
    let mut lines = Lines { next: 0, end: rows };
    let began = Instant::now();
    let copied = client.copy_in("COPY rows FROM STDIN", |message| lines.write(message)).await?;
    let took = began.elapsed().as_secs_f64();
    anyhow::ensure!(copied == u64::from(rows), "{copied} rows were copied, expected {rows}");
    client.close().await?;
    Ok(took)
}

/// Generates the rows in COPY's text format. All rows differ, and none contains a byte that COPY
/// escapes.
struct Lines {
    next: u32,
    end: u32,
}

impl Lines {
    /// Appends the next rows. Returns false if there are none left.
    fn write(&mut self, message: &mut Vec<u8>) -> bool {
        use std::io::Write;
        while self.next < self.end && message.len() < MESSAGE_BYTES {
            let (id, start) = (self.next, message.len());
            // Writing to memory cannot fail.
            let number = id.wrapping_mul(2_654_435_761) >> 1;
            let _ = write!(message, "{id}\t{number}\tshort text number {id}\t");
            let mut state = u64::from(id) + 1;
            while message.len() < start + ROW_BYTES {
                // Within a row, letters repeat no more often than in prose.
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                message.extend(state.to_le_bytes().map(|byte| b'a' + byte % 26));
            }
            message.push(b'\n');
            self.next += 1;
        }
        !message.is_empty()
    }
}
