//! Removes files that a crash has left incomplete in a directory.
//!
//! `object_store` and [`super::file_upload`] write an object into a file next to its final place,
//! `NAME#1`, and rename it when it is complete. Names of objects never have that form, and listings
//! skip such files, so no other component removes them.

use std::fs;
use std::io;
use std::path::Path;
use std::time::SystemTime;

/// Removes all such files that have not been modified since `before`, and returns their number.
/// Succeeds if the directory does not exist.
pub(super) fn sweep(directory: &Path, before: SystemTime) -> io::Result<u64> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    let mut swept = 0;
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            swept += sweep(&entry.path(), before)?;
        } else if is_staged(&entry.file_name().to_string_lossy()) {
            swept += u64::from(remove_if_older(&entry, before)?);
        }
    }
    Ok(swept)
}

fn is_staged(name: &str) -> bool {
    let Some((_, number)) = name.rsplit_once('#') else { return false };
    !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit())
}

fn remove_if_older(entry: &fs::DirEntry, before: SystemTime) -> io::Result<bool> {
    let removed = entry.metadata().and_then(|metadata| metadata.modified()).and_then(|modified| {
        if modified >= before {
            return Ok(false);
        }
        fs::remove_file(entry.path()).map(|()| true)
    });
    match removed {
        // The upload was completed or aborted in the meantime.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;

    use super::*;
    use crate::store::{Backend, Span, Store};

    #[tokio::test]
    async fn removes_only_incomplete_files() {
        let directory = tempfile::tempdir().unwrap();
        let store = Backend::directory(directory.path()).unwrap();
        store.put("segments/aa", Bytes::from_static(b"whole")).await.unwrap();
        // As in a crash, the upload is not dropped, so its file remains.
        let mut upload = store.upload("segments/bb").await.unwrap();
        upload.part(Bytes::from_static(b"half")).await.unwrap();
        std::mem::forget(upload);
        let staged = directory.path().join("segments/bb#1");
        assert!(staged.exists());

        let written = fs::metadata(&staged).unwrap().modified().unwrap();
        assert_eq!(
            sweep(directory.path(), written).unwrap(),
            0,
            "a file that may still be written must be kept"
        );
        assert_eq!(sweep(directory.path(), written + Duration::from_secs(1)).unwrap(), 1);
        assert!(!staged.exists());
        assert_eq!(store.list("segments", None).await.unwrap().names, ["segments/aa"]);
        assert_eq!(&store.get("segments/aa", Span::Whole).await.unwrap().bytes[..], b"whole");
        assert_eq!(sweep(&directory.path().join("nowhere"), written).unwrap(), 0);
    }

    #[test]
    fn recognizes_only_staging_names_of_the_library() {
        assert!(is_staged("0123#1") && is_staged("a#b#42"));
        assert!(!is_staged("0123") && !is_staged("0123#") && !is_staged("0123#a") && !is_staged("#1a"));
    }
}
