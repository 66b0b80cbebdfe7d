//! Small JSON files of a data directory, with a format version and a checksum.
//!
//! ```text
//! {"v":1,FIELDS,"crc":N}
//! ```
//!
//! `crc` is always the last field: the CRC-32 of all bytes before `,"crc"`. A file without a
//! matching checksum is refused. Files are replaced atomically, and are durable when a change
//! returns.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use fulmar_cluster::Error;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

const FORMAT_VERSION: u32 = 1;
/// Between the checksummed bytes and the checksum.
const CHECKSUM_FIELD: &str = ",\"crc\":";

#[derive(Serialize)]
struct Contents<'a, T> {
    v: u32,
    #[serde(flatten)]
    fields: &'a T,
}

#[derive(Deserialize)]
struct Version {
    v: u32,
}

/// Reads a file; `None` if it does not exist. An error names the file and the remedy.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, Error> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("read", path, &error)),
    };
    let damaged = |cause: &str| {
        Error::Directory(format!(
            "{} is damaged: {cause}; restore it from a backup of this data directory",
            path.display()
        ))
    };
    let object = checked(&bytes).ok_or_else(|| damaged("it does not match its checksum"))?;
    let invalid = |error: serde_json::Error| damaged(&error.to_string());
    let Version { v } = serde_json::from_str(&object).map_err(invalid)?;
    if v != FORMAT_VERSION {
        return Err(Error::Directory(format!(
            "{} has format version {v} (supported: {FORMAT_VERSION}); start the version of Fulmar that wrote it",
            path.display()
        )));
    }
    serde_json::from_str(&object).map(Some).map_err(invalid)
}

/// Replaces a file, or creates it, readable only by its owner. `value` must be a struct with at
/// least one field.
pub fn write<T: Serialize>(path: &Path, value: &T) -> Result<(), Error> {
    let object = serde_json::to_string(&Contents { v: FORMAT_VERSION, fields: value });
    let mut text = object.map_err(|error| Error::Directory(error.to_string()))?;
    text.pop(); // the closing brace
    let checksum = crc32fast::hash(text.as_bytes());
    text += &format!("{CHECKSUM_FIELD}{checksum}}}");
    let temporary = path.with_extension("new");
    write_durably(&temporary, text.as_bytes()).map_err(|error| failed("write", &temporary, &error))?;
    fs::rename(&temporary, path).map_err(|error| failed("replace", path, &error))?;
    sync_directory_of(path)
}

/// Removes a file, if it exists. Durable when this returns.
pub fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed("remove", path, &error)),
        _ => sync_directory_of(path),
    }
}

/// Returns the JSON object in the file without its checksum. `None` if the checksum does not match.
fn checked(bytes: &[u8]) -> Option<String> {
    let (fields, checksum) = str::from_utf8(bytes).ok()?.rsplit_once(CHECKSUM_FIELD)?;
    let is_whole = checksum == format!("{}}}", crc32fast::hash(fields.as_bytes()));
    is_whole.then(|| format!("{fields}}}"))
}

fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn sync_directory_of(path: &Path) -> Result<(), Error> {
    let Some(parent) = path.parent() else { return Ok(()) };
    let synced = File::open(parent).and_then(|directory| directory.sync_all());
    synced.map_err(|error| failed("sync", parent, &error))
}

fn failed(action: &str, path: &Path, error: &io::Error) -> Error {
    Error::Directory(format!("cannot {action} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
    struct Record {
        name: String,
        number: Option<u64>,
    }

    const TEXT: &str = r#"{"v":1,"name":"n1,\"crc\":7}","number":18446744073709551615,"crc":3173856315}"#;

    fn record() -> Record {
        Record { name: "n1,\"crc\":7}".to_owned(), number: Some(u64::MAX) }
    }

    /// Appends the checksum to an object without its closing brace.
    fn with_checksum(fields: &str) -> String {
        format!("{fields},\"crc\":{}}}", crc32fast::hash(fields.as_bytes()))
    }

    #[test]
    fn written_file_is_read_and_has_the_documented_format() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.json");
        assert_eq!(read::<Record>(&path).unwrap(), None);
        write(&path, &Record { name: String::new(), number: None }).unwrap();
        write(&path, &record()).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), TEXT);
        assert_eq!(read(&path).unwrap(), Some(record()));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "no temporary file is left");
        remove(&path).unwrap();
        remove(&path).unwrap();
        assert_eq!(read::<Record>(&path).unwrap(), None);
    }

    #[test]
    fn every_damage_is_refused_with_the_name_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.json");
        let assert_refused = |bytes: &[u8], expected: &str| {
            fs::write(&path, bytes).unwrap();
            let error = read::<Record>(&path).unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()) && error.contains(expected), "{error}");
        };
        let good = TEXT.as_bytes();
        let remedy = "; restore it from a backup of this data directory";
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bytes = good.to_vec();
                bytes[at] ^= 1 << bit;
                assert_refused(&bytes, remedy);
            }
            assert_refused(&good[..at], remedy);
        }
        assert_refused(&[good, b"\n"].concat(), remedy);
        assert_refused(br#"{"v":1,"name":"n1","number":7}"#, "it does not match its checksum");
        let lacks_field = with_checksum(r#"{"v":1,"number":7"#);
        assert_refused(lacks_field.as_bytes(), "missing field `name`");
        let newer = with_checksum(r#"{"v":2"#);
        assert_refused(newer.as_bytes(), "has format version 2 (supported: 1); start the version of Fulmar");
    }
}
