//! What an earlier life has left: which files there are, and what is in them.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::format::{self, Directory, FOOTER_BYTES, HEAD_BYTES, HEADER_BYTES};
use super::{MOST_FILE_BYTES, file_path};

const WALK_BUFFER_BYTES: usize = 1 << 20;

/// The numbers and lengths of the files in a directory, the oldest first. What has another name is not ours.
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

/// Opens a file and finds what is in it. `None` if it is of another version, or nothing in it is whole. One without a directory
/// gets one behind its last whole entry, and what stood there is cut off: nobody reads it yet. A crash on the way leaves a file
/// like the one that was found.
pub(super) fn take_over(path: &Path) -> io::Result<Option<TakenOver>> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    let bytes = file.metadata()?.len();
    let mut header = [0; HEADER_BYTES];
    // We make none that are longer.
    if !(HEADER_BYTES as u64..=MOST_FILE_BYTES).contains(&bytes) {
        return Ok(None);
    }
    file.read_exact_at(&mut header, 0)?;
    if header != format::header() {
        return Ok(None);
    }
    if let Some(directory) = read_directory(&file, bytes)? {
        return Ok(Some(TakenOver { file, bytes, directory }));
    }
    let (directory, end) = walk(&file)?;
    if directory.is_empty() {
        return Ok(None);
    }
    let tail = format::encode_directory(&directory, end);
    file.set_len(end)?;
    file.write_all_at(&tail, end)?;
    Ok(Some(TakenOver { file, bytes: end + tail.len() as u64, directory }))
}

/// The directory at the end of a file of so many bytes, if it was ended.
pub(super) fn read_directory(file: &File, bytes: u64) -> io::Result<Option<Directory>> {
    let Some(at) = bytes.checked_sub(FOOTER_BYTES as u64) else { return Ok(None) };
    let mut footer = [0; FOOTER_BYTES];
    file.read_exact_at(&mut footer, at)?;
    let Some((place, crc)) = format::decode_footer(&footer, bytes) else { return Ok(None) };
    let mut directory = vec![0; (place.end - place.start) as usize];
    file.read_exact_at(&mut directory, place.start)?;
    Ok(format::decode_directory(&directory, place.start, crc))
}

/// Reads entries one after the other, up to the first that is not whole. Answers them, and where they end.
fn walk(file: &File) -> io::Result<(Directory, u64)> {
    let mut reader = BufReader::with_capacity(WALK_BUFFER_BYTES, file);
    // The file was opened a moment ago: it is read from its beginning.
    reader.read_exact(&mut [0; HEADER_BYTES])?;
    let (mut directory, mut end) = (Directory::new(), HEADER_BYTES);
    let mut entry = Vec::new();
    while read_next(&mut reader, &mut entry)? {
        let Some((key, _)) = format::check_entry(&entry) else { break };
        directory.push((key.hash(), end as u32));
        end += entry.len();
    }
    Ok((directory, end as u64))
}

/// Reads what may be an entry. Answers whether there is one.
fn read_next(reader: &mut impl Read, entry: &mut Vec<u8>) -> io::Result<bool> {
    entry.resize(HEAD_BYTES, 0);
    if !read_all(reader, entry)? {
        return Ok(false);
    }
    let Some(held) = format::held_bytes(entry) else { return Ok(false) };
    entry.resize(format::entry_bytes(held), 0);
    read_all(reader, &mut entry[HEAD_BYTES..])
}

/// Answers whether there were as many bytes.
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

    /// Puts checksums right that mutations do not survive: of the footer, of the directory, of entries one after the other.
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
        while let Some(held) = file.get(at..).and_then(format::held_bytes) {
            let Some(checked) = file.get(at + 4..at + HEAD_BYTES + held) else { return };
            let crc = crc32fast::hash(checked);
            put(file, at, crc);
            at += format::entry_bytes(held);
        }
    }

    /// Any bytes as a file that an earlier life has left: what is taken over ends as a file that was ended does, and is found so by
    /// the next life.
    #[test]
    fn fuzz_disk_cache() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("00000001");
        let target = Target::new("disk-cache", env!("CARGO_MANIFEST_DIR")).seeds(seeds()).longest(4 << 10);
        target.words(&["FULMCACH", "FULMCACE"]).allocates(12 << 20, 64).run(|input| {
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
