//! Takes over the files that an earlier process has left in the cache's directory.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::format::{self, Directory, FOOTER_BYTES, HEAD_BYTES, HEADER_BYTES};
use super::{MAX_FILE_BYTES, file_path};

const SCAN_BUFFER_BYTES: usize = 1 << 20;

/// Lists the numbers and lengths of the cache's files in a directory, oldest first. Files with
/// other names are ignored.
pub(super) fn find(directory: &Path) -> io::Result<Vec<(u32, u64)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| u32::from_str_radix(name, 16).ok());
        if let Some(number) = number.filter(|number| file_path(directory, *number) == entry.path()) {
            found.push((number, entry.metadata()?.len()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// A file that was taken over.
pub(super) struct TakenOver {
    pub(super) file: File,
    pub(super) bytes: u64,
    pub(super) directory: Directory,
}

/// Opens a file and finds its entries. Returns None if it has another version, or no complete
/// entry. If the file has no directory, truncates it after its last complete entry, and appends a
/// directory: no reader uses the file yet. A crash in between leaves a file that can be taken over
/// in the same way.
pub(super) fn take_over(path: &Path) -> io::Result<Option<TakenOver>> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let bytes = file.metadata()?.len();
    let mut header = [0; HEADER_BYTES];
    // No version of the cache creates longer files.
    if !(HEADER_BYTES as u64..=MAX_FILE_BYTES).contains(&bytes) {
        return Ok(None);
    }
    file.read_exact_at(&mut header, 0)?;
    if header != format::header() {
        return Ok(None);
    }
    if let Some(directory) = read_directory(&file, bytes)? {
        return Ok(Some(TakenOver { file, bytes, directory }));
    }
    let (directory, end) = scan_entries(&file)?;
    if directory.is_empty() {
        return Ok(None);
    }
    let tail = format::encode_directory(&directory, end);
    file.set_len(end)?;
    file.write_all_at(&tail, end)?;
    Ok(Some(TakenOver { file, bytes: end + tail.len() as u64, directory }))
}

/// Reads the directory at the end of a file of this length. Returns None if the file was not
/// finished.
pub(super) fn read_directory(file: &File, bytes: u64) -> io::Result<Option<Directory>> {
    let Some(at) = bytes.checked_sub(FOOTER_BYTES as u64) else { return Ok(None) };
    let mut footer = [0; FOOTER_BYTES];
    file.read_exact_at(&mut footer, at)?;
    let Some((place, crc)) = format::decode_footer(&footer, bytes) else { return Ok(None) };
    let mut directory = vec![0; (place.end - place.start) as usize];
    file.read_exact_at(&mut directory, place.start)?;
    Ok(format::decode_directory(&directory, place.start, crc))
}

/// Reads entries in sequence up to the first one that is not complete. Returns them, and their end.
fn scan_entries(file: &File) -> io::Result<(Directory, u64)> {
    let mut reader = BufReader::with_capacity(SCAN_BUFFER_BYTES, file);
    // The file was just opened, so it is read from its start.
    reader.read_exact(&mut [0; HEADER_BYTES])?;
    let (mut directory, mut end) = (Directory::new(), HEADER_BYTES);
    let mut entry = Vec::new();
    while read_candidate(&mut reader, &mut entry)? {
        let Some((key, _)) = format::check_entry(&entry) else { break };
        directory.push((key.hash(), end as u32));
        end += entry.len();
    }
    Ok((directory, end as u64))
}

/// Reads the bytes of a possible entry. Returns false if there is none.
fn read_candidate(reader: &mut impl Read, entry: &mut Vec<u8>) -> io::Result<bool> {
    entry.resize(HEAD_BYTES, 0);
    if !read_all(reader, entry)? {
        return Ok(false);
    }
    let Some(value) = format::value_bytes(entry) else { return Ok(false) };
    entry.resize(format::entry_bytes(value), 0);
    read_all(reader, &mut entry[HEAD_BYTES..])
}

/// Fills the buffer. Returns false if the file ends before.
fn read_all(reader: &mut impl Read, bytes: &mut [u8]) -> io::Result<bool> {
    match reader.read_exact(bytes) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        read => read.map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use fulmar_fuzz::Target;
    use fulmar_pages::SegmentId;

    use super::super::format::Key;
    use super::super::reader::read_entry;
    use super::*;

    fn seeds() -> [Vec<u8>; 2] {
        let mut file = format::header().to_vec();
        let mut directory = Directory::new();
        for number in 0..5_u64 {
            let key = Key::frame(SegmentId(7), number);
            directory.push((key.hash(), file.len() as u32));
            format::push_entry(key, &vec![number as u8; 20 + number as usize], &mut file);
        }
        let end = file.len() as u64;
        let ended = [file.clone(), format::encode_directory(&directory, end)].concat();
        [file, ended]
    }

    /// Recomputes checksums that mutations do not survive: of the footer, the directory, and
    /// consecutive entries.
    fn sign(file: &mut [u8]) {
        let put = |file: &mut [u8], at: usize, crc: u32| file[at..at + 4].copy_from_slice(&crc.to_le_bytes());
        if let Some(footer) = file.len().checked_sub(FOOTER_BYTES) {
            let begin = usize::from(file[footer]) | usize::from(file[footer + 1]) << 8;
            if let Some(directory) = file.get(begin..footer) {
                let crc = crc32fast::hash(directory);
                put(file, footer + 12, crc);
            }
            let crc = crc32fast::hash(&file[footer..footer + 20]);
            put(file, footer + 20, crc);
        }
        let mut at = HEADER_BYTES;
        while let Some(value) = file.get(at..).and_then(format::value_bytes) {
            let Some(checked) = file.get(at + 4..at + HEAD_BYTES + value) else { return };
            let crc = crc32fast::hash(checked);
            put(file, at, crc);
            at += format::entry_bytes(value);
        }
    }

    /// Fuzz target: arbitrary bytes as a file that an earlier process has left. After a takeover
    /// the file is finished, and a second takeover finds the same entries.
    #[test]
    fn fuzz_disk_cache() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("00000001");
        let target = Target::new("disk-cache", env!("CARGO_MANIFEST_DIR")).seeds(seeds()).max_length(4 << 10);
        target.words(&["FULMCACH", "FULMCACE"]).max_allocation(12 << 20, 64).run(|input| {
            let mut bytes = input.to_vec();
            if input.len().is_multiple_of(2) {
                sign(&mut bytes);
            }
            std::fs::write(&path, &bytes).unwrap();
            let Some(taken) = take_over(&path).unwrap() else { return };
            for (_, at) in &taken.directory {
                let entry = read_entry(&taken.file, u64::from(*at)).map(Bytes::from);
                let _ = entry.is_ok_and(|entry| format::check_entry(&entry).is_some());
            }
            let again = take_over(&path).unwrap().unwrap();
            assert_eq!((again.bytes, again.directory), (taken.bytes, taken.directory));
        });
    }
}
