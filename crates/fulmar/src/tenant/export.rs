//! `fulmar tenant export`: a tenant as a plain SQLite file.
//!
//! The file is written beside its place under another name, and gets its own when it is complete and synced: whatever
//! ends this early, there is no file that looks like an export and is none.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use futures::TryStreamExt;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde::Serialize;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio_postgres::Client;

use super::{literal, server_error, texts};
use crate::cli::ExportArgs;
use crate::output;

/// What was written, for scripts.
#[derive(Serialize)]
struct Exported<'a> {
    tenant: &'a str,
    bytes: u64,
    seconds: f64,
}

/// Writes the file.
pub async fn run(client: &Client, arguments: &ExportArgs, json: bool) -> anyhow::Result<()> {
    let began = Instant::now();
    let ExportArgs { name, file, force, at } = arguments;
    let not_exported = || format!("{name} was not exported");
    if let Some(at) = at {
        let looked = client.batch_execute(&format!("SET fulmar.as_of = {}", literal(at))).await;
        looked.map_err(|error| server_error(&error)).with_context(not_exported)?;
    }
    let bytes = if file == Path::new("-") {
        ensure!(
            !std::io::stdout().is_terminal(),
            "the file is to go to a pipe or a file, not to the terminal"
        );
        ensure!(!json, "with --json the standard output is taken; name a file");
        copy(client, &mut tokio::io::stdout()).await.with_context(not_exported)?
    } else {
        let partial = Partial::beside(file, *force)?;
        let opened = tokio::fs::File::create_new(&partial.path).await;
        let mut output = opened.with_context(|| format!("cannot write {}", partial.path.display()))?;
        let bytes = copy(client, &mut output).await.with_context(not_exported)?;
        output.sync_all().await.with_context(|| format!("cannot sync {}", partial.path.display()))?;
        partial.keep(file, *force)?;
        bytes
    };
    let seconds = began.elapsed().as_secs_f64();
    if json {
        return output::json(&Exported { tenant: name, bytes, seconds });
    }
    let rate = bytes as f64 / seconds / 1e6;
    let summary = format!("exported {name} to {}: {seconds:.1} s, {rate:.0} MB/s", file.display());
    if file == Path::new("-") {
        eprintln!("{summary}");
        return Ok(());
    }
    output::line(&summary)
}

/// Copies all pages; answers their bytes.
async fn copy(client: &Client, output: &mut (impl AsyncWrite + Unpin)) -> anyhow::Result<u64> {
    let size = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size";
    let expected = texts(client, size).await?.first().and_then(|[bytes]| bytes.parse().ok());
    let copied = client.copy_out("COPY DATABASE TO STDOUT (FORMAT sqlite)").await;
    let mut pages = Box::pin(copied.map_err(|error| server_error(&error))?);
    let bar = output::byte_progress("exporting", expected);
    let mut bytes = 0;
    while let Some(piece) = pages.try_next().await.map_err(|error| server_error(&error))? {
        output.write_all(&piece).await.context("cannot write the file")?;
        bytes += piece.len() as u64;
        bar.set_position(bytes);
    }
    output.flush().await.context("cannot write the file")?;
    bar.finish_and_clear();
    Ok(bytes)
}

/// A file that is not complete; deleted if it does not become so.
struct Partial {
    path: PathBuf,
}

impl Partial {
    fn beside(file: &Path, force: bool) -> anyhow::Result<Partial> {
        if !force && file.symlink_metadata().is_ok() {
            bail!("{} exists; --force replaces it", file.display());
        }
        let mut name =
            file.file_name().with_context(|| format!("{} names no file", file.display()))?.to_owned();
        name.push(format!(".{}.partial", std::process::id()));
        Ok(Partial { path: file.with_file_name(name) })
    }

    fn keep(self, file: &Path, force: bool) -> anyhow::Result<()> {
        let flags = if force { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        renameat_with(CWD, &self.path, CWD, file, flags)
            .with_context(|| format!("cannot rename {} to {}", self.path.display(), file.display()))?;
        let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let synced = std::fs::File::open(parent).and_then(|directory| directory.sync_all());
        synced.with_context(|| format!("cannot sync {}", parent.display()))
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // It has its own name by now, or nobody wants it.
        let _ = std::fs::remove_file(&self.path);
    }
}
