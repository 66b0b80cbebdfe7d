//! `fulmar tenant import`: creates a tenant from an SQLite file.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, bail};
use bytes::Bytes;
use futures::pin_mut;
use rusqlite::OpenFlags;
use serde::Serialize;
use tokio_postgres::Client;

use super::{open, quoted, send_file, server_error};
use crate::cli::ImportArgs;
use crate::output;

/// The result, for `--json`.
#[derive(Serialize)]
struct Imported<'a> {
    tenant: &'a str,
    bytes: u64,
    seconds: f64,
}

/// Creates the tenant. After an error it does not exist.
pub async fn run(client: &Client, arguments: &ImportArgs, json: bool) -> anyhow::Result<()> {
    let began = Instant::now();
    let ImportArgs { name, file, owner } = arguments;
    let not_imported = || format!("cannot import tenant \"{name}\"");
    let (mut input, length) = open(file).await?;
    let _lock = lock(file).with_context(not_imported)?;
    let owner = owner.as_ref().map(|owner| format!(", OWNER {}", quoted(owner))).unwrap_or_default();
    let sql = format!("COPY DATABASE {} FROM STDIN (FORMAT sqlite{owner})", quoted(name));
    let copied = client.copy_in::<_, Bytes>(&sql).await.map_err(|error| server_error(&error));
    let sink = copied.with_context(not_imported)?;
    pin_mut!(sink);
    let bar = output::byte_progress("importing", length);
    let (bytes, sent) = send_file(&mut input, file, sink.as_mut(), &bar).await;
    let done = match sent {
        Ok(()) => sink.finish().await.map_err(|error| server_error(&error)),
        Err(error) => Err(error),
    };
    bar.finish_and_clear();
    done.with_context(not_imported)?;
    let seconds = began.elapsed().as_secs_f64();
    if json {
        return output::json(&Imported { tenant: name, bytes, seconds });
    }
    let rate = bytes as f64 / seconds / 1e6;
    output::line(&format!("imported {} as {name}: {seconds:.1} s, {rate:.0} MB/s", file.display()))
}

/// Locks the file against writes by other processes, with SQLite's own locks. Fails if the database
/// has a write-ahead log with content, which is not part of the file.
fn lock(file: &Path) -> anyhow::Result<Option<rusqlite::Connection>> {
    if file == Path::new("-") {
        return Ok(None);
    }
    let mut wal = file.as_os_str().to_owned();
    wal.push("-wal");
    if Path::new(&wal).metadata().is_ok_and(|data| data.len() > 0) {
        let shown = file.display();
        bail!(
            "{shown} has a write-ahead log ({shown}-wal), which contains part of the data; create \
             a copy that can be imported: sqlite3 {shown} \"VACUUM INTO 'NEW.db'\""
        );
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = rusqlite::Connection::open_with_flags(file, flags);
    let locked = connection.and_then(|connection| {
        connection.execute_batch("BEGIN; SELECT count(*) FROM sqlite_schema")?;
        Ok(Some(connection))
    });
    locked.with_context(|| format!("cannot read {} as an SQLite database", file.display()))
}
