//! `fulmar tenant`: administers tenants with SQL statements.
//!
//! The command is an ordinary client, and needs no other port and no more privileges than psql. It
//! connects to the database `fulmar`; `load`, `export`, `exec` and `history` connect to the
//! tenants.

mod exec;
mod export;
mod history;
mod import;
mod load;

use std::io::IsTerminal;
use std::path::Path;
use std::pin::Pin;

use anyhow::Context;
use bytes::{Bytes, BytesMut};
use futures::SinkExt;
use indicatif::ProgressBar;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio_postgres::{Client, CopyInSink, SimpleQueryMessage, SimpleQueryRow};

use crate::cli::{TenantAction, TenantArgs};
use crate::client::{connect, server_error};
use crate::output;

/// The database that takes administration statements.
pub const SYSTEM_DATABASE: &str = "fulmar";

/// Size of the chunks in which a file is sent.
const CHUNK_BYTES: usize = 256 << 10;

/// A progress bar is shown for at least this many tenants.
const MIN_TENANTS_FOR_PROGRESS: usize = 20;

/// The result for one tenant, for `--json`.
#[derive(Serialize)]
struct Done<'a> {
    #[serde(rename = "tenant")]
    name: &'a str,
    done: &'static str,
}

/// A row of the tenant list.
#[derive(Serialize)]
struct TenantRow {
    #[serde(rename = "tenant")]
    name: String,
    owner: String,
}

/// Runs `fulmar tenant`.
pub async fn run(arguments: TenantArgs) -> anyhow::Result<()> {
    let TenantArgs { action, server, json } = arguments;
    let system = || connect(&server, SYSTEM_DATABASE);
    match action {
        TenantAction::Create { names, owner, template, at } => {
            let clauses = create_clauses(owner.as_deref(), template.as_deref(), at.as_deref());
            let statement = |name: &str| format!("CREATE DATABASE {}{clauses}", quoted(name));
            for_each(&system().await?, &names, statement, "created", json).await
        }
        TenantAction::Drop { names } => {
            let statement = |name: &str| format!("DROP DATABASE {}", quoted(name));
            for_each(&system().await?, &names, statement, "dropped", json).await
        }
        TenantAction::Rename { from, to } => {
            let statement = |_: &str| format!("ALTER DATABASE {} RENAME TO {}", quoted(&from), quoted(&to));
            for_each(&system().await?, std::slice::from_ref(&from), statement, "renamed", json).await
        }
        TenantAction::List => list(&system().await?, json).await,
        TenantAction::History { name } => history::list(&connect(&server, &name).await?, json).await,
        TenantAction::Restore { name, to } => {
            let statement =
                |_: &str| format!("ALTER DATABASE {} RESTORE TO TIMESTAMP {}", quoted(&name), literal(&to));
            for_each(&system().await?, std::slice::from_ref(&name), statement, "restored", json).await
        }
        TenantAction::Load(load) => load::run(&connect(&server, &load.name).await?, &load, json).await,
        TenantAction::Export(export) => {
            export::run(&connect(&server, &export.name).await?, &export, json).await
        }
        TenantAction::Import(import) => import::run(&system().await?, &import, json).await,
        TenantAction::Exec(exec) => exec::run(&server, &exec, json).await,
    }
}

/// Runs a statement for each name in order. Stops at the first error.
async fn for_each(
    client: &Client,
    names: &[String],
    statement: impl Fn(&str) -> String,
    done: &'static str,
    json: bool,
) -> anyhow::Result<()> {
    let bar = (names.len() >= MIN_TENANTS_FOR_PROGRESS).then(|| output::progress(done, names.len() as u64));
    for name in names {
        client
            .batch_execute(&statement(name))
            .await
            .map_err(|error| server_error(&error))
            .with_context(|| format!("tenant \"{name}\" was not {done}"))?;
        match &bar {
            Some(bar) => bar.inc(1),
            None if !json => output::line(&format!("{done} {name}"))?,
            None => {}
        }
    }
    if let Some(bar) = bar {
        bar.finish_and_clear();
        output::line(&format!("{done} {} tenants", names.len()))?;
    }
    if json {
        output::json(&names.iter().map(|name| Done { name, done }).collect::<Vec<_>>())?;
    }
    Ok(())
}

async fn list(client: &Client, json: bool) -> anyhow::Result<()> {
    let sql = "SELECT datname, pg_catalog.pg_get_userbyid(datdba) FROM pg_catalog.pg_database ORDER BY 1";
    let rows = texts(client, sql).await?;
    let tenants: Vec<TenantRow> = rows.into_iter().map(|[name, owner]| TenantRow { name, owner }).collect();
    if json {
        return output::json(&tenants);
    }
    let mut table = output::table(["tenant", "owner"]);
    table.add_rows(tenants.iter().map(|tenant| [&tenant.name, &tenant.owner]));
    output::line(&table.to_string())
}

/// Runs a query and returns its rows as text. All `N` columns must be non-null.
pub async fn texts<const N: usize>(client: &Client, sql: &str) -> anyhow::Result<Vec<[String; N]>> {
    let messages = client.simple_query(sql).await.map_err(|error| server_error(&error))?;
    let rows = messages.into_iter().filter_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    });
    let texts = |row: SimpleQueryRow| {
        let columns = (0..N).map(|column| row.try_get(column).ok().flatten().map(str::to_owned));
        let texts = columns.collect::<Option<Vec<String>>>().and_then(|texts| texts.try_into().ok());
        texts.context("the server returned NULL or an unexpected number of columns")
    };
    rows.map(texts).collect()
}

/// Opens a file, and returns its size if known. `-` is standard input.
async fn open(file: &Path) -> anyhow::Result<(Box<dyn AsyncRead + Unpin>, Option<u64>)> {
    if file == Path::new("-") {
        anyhow::ensure!(
            !std::io::stdin().is_terminal(),
            "standard input is a terminal; redirect it from a file or a pipe"
        );
        return Ok((Box::new(tokio::io::stdin()), None));
    }
    let opened = tokio::fs::File::open(file).await;
    let opened = opened.with_context(|| format!("cannot open {}", file.display()))?;
    let data = opened.metadata().await?;
    Ok((Box::new(opened), data.is_file().then_some(data.len())))
}

/// Sends the file to the server and updates the bar. Returns the number of bytes read, and the
/// error that stopped it, if any. If the caller then drops the sink, the COPY fails and the server
/// keeps nothing.
async fn send_file(
    input: &mut (dyn AsyncRead + Unpin),
    file: &Path,
    mut sink: Pin<&mut CopyInSink<Bytes>>,
    bar: &ProgressBar,
) -> (u64, anyhow::Result<()>) {
    let mut bytes = 0;
    loop {
        let mut chunk = BytesMut::with_capacity(CHUNK_BYTES);
        match input.read_buf(&mut chunk).await {
            Ok(0) => return (bytes, Ok(())),
            Ok(count) => bytes += count as u64,
            Err(cause) => return (bytes, Err(anyhow::anyhow!("cannot read {}: {cause}", file.display()))),
        }
        if let Err(error) = sink.send(chunk.freeze()).await {
            return (bytes, Err(server_error(&error)));
        }
        bar.set_position(bytes);
    }
}

fn create_clauses(owner: Option<&str>, template: Option<&str>, at: Option<&str>) -> String {
    let clause = |keyword: &str, name: Option<&str>| {
        name.map(|name| format!(" {keyword} {}", quoted(name))).unwrap_or_default()
    };
    let Some(at) = at else {
        return format!("{}{}", clause("OWNER", owner), clause("TEMPLATE", template));
    };
    format!("{}{} AT TIMESTAMP {}", clause("OWNER", owner), clause("BRANCH OF", template), literal(at))
}

/// Quotes a text as an SQL string literal.
pub fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// Quotes a name as an SQL identifier.
pub fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_times_are_quoted() {
        assert_eq!(quoted("shop"), "\"shop\"");
        assert_eq!(quoted("a\"; DROP DATABASE \"b"), "\"a\"\"; DROP DATABASE \"\"b\"");
        assert_eq!(create_clauses(None, None, None), "");
        assert_eq!(create_clauses(Some("o'h"), Some("t"), None), " OWNER \"o'h\" TEMPLATE \"t\"");
        assert_eq!(create_clauses(None, Some("t"), Some("n'")), " BRANCH OF \"t\" AT TIMESTAMP 'n'''");
    }
}
