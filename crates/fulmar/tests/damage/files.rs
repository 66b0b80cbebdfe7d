//! Corruption of each file of a data directory, in each way.

use super::*;

/// A way to corrupt a file. Preallocated files are used up to their last byte that is not zero.
#[derive(Clone, Copy, Debug)]
pub enum Corruption {
    /// Flips a bit at this eighth of the used bytes.
    Flip(usize),
    /// Zeroes 64 bytes in the middle.
    Zero,
    /// Keeps the first half.
    Cut,
    Empty,
    Delete,
}

pub const CORRUPTIONS: [Corruption; 7] = [
    Corruption::Flip(0),
    Corruption::Flip(2),
    Corruption::Flip(5),
    Corruption::Zero,
    Corruption::Cut,
    Corruption::Empty,
    Corruption::Delete,
];

/// Three ways are enough for objects of the store: `verify.rs` corrupts every object.
const OBJECT_CORRUPTIONS: [Corruption; 3] = [Corruption::Flip(2), Corruption::Cut, Corruption::Delete];

impl Corruption {
    fn apply(self, file: &Path) {
        let mut bytes = std::fs::read(file).unwrap();
        let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        match self {
            Corruption::Flip(part) if used > 0 => bytes[used * part / 8] ^= 4,
            Corruption::Zero => {
                let middle = used / 2;
                bytes[middle..used.min(middle + 64)].fill(0);
            }
            Corruption::Cut => bytes.truncate(used / 2),
            Corruption::Flip(_) | Corruption::Empty => bytes.clear(),
            Corruption::Delete => return std::fs::remove_file(file).unwrap(),
        }
        std::fs::write(file, bytes).unwrap();
    }
}

/// Returns the part of the path that a report must contain.
fn name_in_messages(file: &Path) -> String {
    let name = file.to_str().unwrap();
    name.strip_prefix("store/").unwrap_or(name).to_owned()
}

/// Corrupts a file in a copy. Returns the error of the start or of a client, or `None` if all data
/// is intact. Then restores the file and checks that all data is readable again.
async fn damage_is_reported_or_harmless(good: &Rig, file: &Path, corruption: Corruption) -> Option<String> {
    let trial = good.copy();
    corruption.apply(&trial.data().join(file));
    let reported = match trial.read().await {
        Ok(found) => {
            assert_eq!(found, good.contents, "{corruption:?} {}: data lost without an error", file.display());
            return None;
        }
        Err(reported) => reported,
    };
    assert!(reported.contains(&name_in_messages(file)), "{corruption:?} {}: {reported}", file.display());
    trial.restore(good, file);
    let restored = trial.read().await;
    assert_eq!(restored.as_ref(), Ok(&good.contents), "{corruption:?} {}: after {reported}", file.display());
    Some(reported)
}

/// Corrupts all files in all ways. Returns the number of reported corruptions of each file.
pub async fn damage_all(good: &Rig) -> Vec<(String, usize)> {
    let mut counts = Vec::new();
    for file in good.files() {
        let mut count = 0;
        let corruptions = if file.starts_with("store") { &OBJECT_CORRUPTIONS[..] } else { &CORRUPTIONS };
        for corruption in corruptions {
            count += usize::from(damage_is_reported_or_harmless(good, &file, *corruption).await.is_some());
        }
        counts.push((file.to_str().unwrap().to_owned(), count));
    }
    counts
}

pub fn count_of(counts: &[(String, usize)], file: &str) -> usize {
    counts.iter().find(|(name, _)| name == file).unwrap_or_else(|| panic!("{file}: {counts:?}")).1
}

#[tokio::test(flavor = "multi_thread")]
async fn corruption_after_a_crash_is_reported_or_harmless() {
    let good = rig(Signal::KILL).await;
    let counts = damage_all(&good).await;
    assert_eq!(count_of(&counts, "meta.db-wal"), CORRUPTIONS.len());
    assert!(count_of(&counts, "meta.head") >= 3, "{counts:?}");
    assert!(
        counts.iter().any(|(name, count)| name.starts_with("log/") && *count == CORRUPTIONS.len()),
        "{counts:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn corruption_after_a_shutdown_is_reported_or_harmless() {
    let good = rig(Signal::TERM).await;
    let counts = damage_all(&good).await;
    assert!(!counts.iter().any(|(name, _)| name == "meta.db-wal"));
    assert!(count_of(&counts, "meta.db") >= 4, "{counts:?}");
    assert_eq!(count_of(&counts, "store/owner"), OBJECT_CORRUPTIONS.len());
    for kind in ["store/segments/", "store/manifests/"] {
        assert!(
            counts.iter().any(|(name, count)| name.starts_with(kind) && *count >= 2),
            "{kind} {counts:?}"
        );
    }
}
