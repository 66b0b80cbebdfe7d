//! A million rows of a kilobyte through COPY, from the command to its answer.

use std::time::Instant;

use super::cases::case;
use super::result::CaseResult;
use super::turns::Bench;
use crate::client::Client;
use crate::server::Server;
use crate::tenants;

const DATABASE: &str = "copies";
/// Bytes of a row's text, about.
const ROW_BYTES: usize = 1000;
/// Bytes that are sent at once, about.
const PIECE_BYTES: usize = 64 << 10;

const CREATE: &str =
    "CREATE TABLE rows (id INTEGER PRIMARY KEY, number INTEGER, short VARCHAR(100), long VARCHAR(1000))";

pub(super) async fn measure(bench: &Bench) -> anyhow::Result<Vec<CaseResult>> {
    let mut pair = bench.pair(1).await?;
    pair.each(async |server| tenants::create(&server.target(), &[DATABASE.to_owned()], |_| ()).await).await?;
    let measured = bench.in_turns(&mut pair, [case("copy-in")], async |server| {
        let took = load(server, bench.sizes.copy_rows).await?;
        Ok([f64::from(bench.sizes.copy_rows) / took])
    });
    Ok(measured.await.into())
}

/// Fills an empty table; answers how many seconds it took.
async fn load(server: &Server, rows: u32) -> anyhow::Result<f64> {
    let mut client = Client::connect(&server.target().with_database(DATABASE)).await?;
    client.query("DROP TABLE IF EXISTS rows").await?;
    client.query(CREATE).await?;
    let mut lines = Lines { next: 0, end: rows };
    let began = Instant::now();
    let copied = client.copy_in("COPY rows FROM STDIN", |piece| lines.write(piece)).await?;
    let took = began.elapsed().as_secs_f64();
    anyhow::ensure!(copied == u64::from(rows), "{copied} rows were copied instead of {rows}");
    client.close().await?;
    Ok(took)
}

/// The rows as text: no two alike, no byte that COPY escapes.
struct Lines {
    next: u32,
    end: u32,
}

impl Lines {
    /// Writes the next ones. `false`: there are no more.
    fn write(&mut self, piece: &mut Vec<u8>) -> bool {
        use std::io::Write;
        while self.next < self.end && piece.len() < PIECE_BYTES {
            let (id, start) = (self.next, piece.len());
            // Writing to memory cannot fail.
            let _ = write!(piece, "{id}\t{}\tshort text number {id}\t", id.wrapping_mul(2_654_435_761) >> 1);
            let mut state = u64::from(id) + 1;
            while piece.len() < start + ROW_BYTES {
                // Letters that repeat within a row no more than prose does.
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                piece.extend(state.to_le_bytes().map(|byte| b'a' + byte % 26));
            }
            piece.push(b'\n');
            self.next += 1;
        }
        !piece.is_empty()
    }
}
