//! Records the newest log file in a separate file, named `newest`, in the log's directory.
//!
//! If the last file of an unsealed log is missing or truncated, nothing in the other files shows
//! it: the log appears to have ended earlier. The newest file is therefore recorded here before
//! anything in it is acknowledged, and a log without that file is refused.
//!
//! | offset | bytes | field |
//! | --- | --- | --- |
//! | 0 | 8 | `FULMCLNW` |
//! | 8 | 4 | format version: 1 |
//! | 12 | 16 | log id |
//! | 28 | 8 | sequence number of the file |
//! | 36 | 8 | length of the file in bytes |
//! | 44 | 4 | checksum of bytes 0-43 |
//!
//! Like a log file's header, the entry lies in one sector, which a disk writes completely or not at
//! all. Zeros mean that no log file was started yet. A directory without this file was written by
//! an earlier version, or has lost only this file.
//!
//! # Crashes
//!
//! The file is created as `newest-new` and renamed once all of it is durable, so that it is
//! complete under its final name from the start.
//!
//! The header of a new log file is durable before the file is recorded here, and no older file is
//! removed before that. The file that is recorded after a crash, the old or the new one, therefore
//! exists.

use std::io;

use fulmar_pages::LogId;

use crate::files::{LogFile, LogFiles};

/// Name of the file.
pub(super) const NEWEST: &str = "newest";
/// Name of the file until it is complete.
pub(super) const NEWEST_NEW: &str = "newest-new";

const MAGIC: &[u8; 8] = b"FULMCLNW";
const FORMAT_VERSION: u32 = 1;
pub(super) const NEWEST_BYTES: usize = 48;
const FILE_BYTES: u64 = 4096;

/// The newest log file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Newest {
    pub(super) log: LogId,
    pub(super) sequence: u64,
    pub(super) bytes: u64,
}

impl Newest {
    fn encode(self) -> [u8; NEWEST_BYTES] {
        let mut out = [0; NEWEST_BYTES];
        out[..8].copy_from_slice(MAGIC);
        out[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        out[12..28].copy_from_slice(&self.log.0.to_le_bytes());
        out[28..36].copy_from_slice(&self.sequence.to_le_bytes());
        out[36..44].copy_from_slice(&self.bytes.to_le_bytes());
        let checksum = crc32fast::hash(&out[..44]);
        out[44..].copy_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Returns None if no log file was started yet, or a description of the damage.
    pub(super) fn decode(bytes: &[u8; NEWEST_BYTES]) -> Result<Option<Newest>, String> {
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let array = |from: usize| <[u8; 8]>::try_from(&bytes[from..from + 8]).unwrap_or_default();
        let number = |from: usize| u64::from_le_bytes(array(from));
        if !bytes.starts_with(MAGIC) || crc32fast::hash(&bytes[..44]).to_le_bytes() != bytes[44..] {
            return Err("the entry for the newest log file is damaged".to_owned());
        }
        let version = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]);
        if version != FORMAT_VERSION {
            return Err(format!(
                "format version {version} is not supported; the file was written by a newer Fulmar"
            ));
        }
        let log = LogId(u128::from(number(12)) | u128::from(number(20)) << 64);
        Ok(Some(Newest { log, sequence: number(28), bytes: number(36) }))
    }
}

/// The file that records the newest log file.
pub(super) struct NewestFile(Box<dyn LogFile>);

impl NewestFile {
    /// Opens the file, or creates it.
    pub(super) fn open(files: &dyn LogFiles) -> io::Result<Self> {
        if files.list()?.iter().any(|name| name == NEWEST) {
            return files.open(NEWEST).map(NewestFile);
        }
        let file = files.create(NEWEST_NEW, FILE_BYTES)?;
        files.rename(NEWEST_NEW, NEWEST)?;
        files.sync_dir()?;
        Ok(NewestFile(file))
    }

    /// Records a log file whose header is durable. The entry is durable when this returns.
    pub(super) fn write(&self, newest: Newest) -> io::Result<()> {
        self.0.write_at(0, &newest.encode())?;
        self.0.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_matches_the_golden_file_and_every_flipped_bit_is_detected() {
        let newest =
            Newest { log: LogId(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10), sequence: 7, bytes: 4 << 20 };
        let golden = include_bytes!("../../../tests/golden/log-newest-v1.bin");
        assert_eq!(&newest.encode(), golden);
        assert_eq!(Newest::decode(golden), Ok(Some(newest)));
        assert_eq!(Newest::decode(&[0; NEWEST_BYTES]), Ok(None));
        for bit in 0..8 * NEWEST_BYTES {
            let mut bytes = *golden;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Newest::decode(&bytes).is_err(), "bit {bit}");
        }
    }
}
