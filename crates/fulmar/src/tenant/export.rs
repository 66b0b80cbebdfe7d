//! `fulmar tenant export`: exports a tenant as an SQLite file.
//!
//! The file is written under a temporary name in the target directory, and renamed once it is
//! complete and synced. However the command ends, an incomplete file never has the target name.

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

/// The result, for `--json`.
#[derive(Serialize)]
struct Exported<'a> {
    tenant: &'a str,
    bytes: u64,
    seconds: f64,
}

/// Runs `fulmar tenant export`.
pub async fn run(client: &Client, arguments: &ExportArgs, json: bool) -> anyhow::Result<()> {
    let began = Instant::now();
    let ExportArgs { name, file, force, at } = arguments;
    let not_exported = || format!("cannot export tenant \"{name}\"");
    if let Some(at) = at {
        let set = client.batch_execute(&format!("SET fulmar.as_of = {}", literal(at))).await;
        set.map_err(|error| server_error(&error)).with_context(not_exported)?;
    }
    let bytes = if file == Path::new("-") {
        ensure!(
            !std::io::stdout().is_terminal(),
            "standard output is a terminal; redirect it to a file or a pipe"
        );
        ensure!(!json, "--json writes its result to standard output; export to a file instead of -");
        copy(client, &mut tokio::io::stdout()).await.with_context(not_exported)?
    } else {
        let partial = PartialFile::new(file, *force)?;
        let opened = tokio::fs::File::create_new(&partial.path).await;
        let mut output = opened.with_context(|| format!("cannot write {}", partial.path.display()))?;
        let bytes = copy(client, &mut output).await.with_context(not_exported)?;
        output.sync_all().await.with_context(|| format!("cannot sync {}", partial.path.display()))?;
        partial.rename_to(file, *force)?;
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

/// Copies all pages to `output`, and returns their size in bytes.
async fn copy(client: &Client, output: &mut (impl AsyncWrite + Unpin)) -> anyhow::Result<u64> {
    let size = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size";
    let expected = texts(client, size).await?.first().and_then(|[bytes]| bytes.parse().ok());
    let copied = client.copy_out("COPY DATABASE TO STDOUT (FORMAT sqlite)").await;
    let mut pages = Box::pin(copied.map_err(|error| server_error(&error))?);
    let bar = output::byte_progress("exporting", expected);
    let mut bytes = 0;
    while let Some(chunk) = pages.try_next().await.map_err(|error| server_error(&error))? {
        output.write_all(&chunk).await.context("cannot write the file")?;
        bytes += chunk.len() as u64;
        bar.set_position(bytes);
    }
    output.flush().await.context("cannot write the file")?;
    bar.finish_and_clear();
    Ok(bytes)
}

/// An incomplete file. Deleted on drop, unless it has been renamed.
struct PartialFile {
    path: PathBuf,
}

impl PartialFile {
    /// Chooses a temporary name in the directory of `file`.
    fn new(file: &Path, force: bool) -> anyhow::Result<PartialFile> {
        if !force && file.symlink_metadata().is_ok() {
            bail!("{} already exists; use --force to overwrite it", file.display());
        }
        let mut name =
            file.file_name().with_context(|| format!("{} is not a file name", file.display()))?.to_owned();
        name.push(format!(".{}.partial", std::process::id()));
        Ok(PartialFile { path: file.with_file_name(name) })
    }

    /// Gives the complete file its name, and syncs the directory.
    fn rename_to(self, file: &Path, force: bool) -> anyhow::Result<()> {
        let flags = if force { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        renameat_with(CWD, &self.path, CWD, file, flags)
            .with_context(|| format!("cannot rename {} to {}", self.path.display(), file.display()))?;
        let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let synced = std::fs::File::open(parent).and_then(|directory| directory.sync_all());
        synced.with_context(|| format!("cannot sync {}", parent.display()))
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        // Fails if the file has been renamed.
        let _ = std::fs::remove_file(&self.path);
    }
}
