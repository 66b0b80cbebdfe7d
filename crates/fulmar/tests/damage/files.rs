//! Each file, damaged in each way.

use super::*;

/// A way to damage a file, of which the first bytes are in use.
#[derive(Clone, Copy, Debug)]
enum Harm {
    /// Flips a bit at this part (of 8) of the bytes in use.
    Flip(usize),
    /// Zeroes 64 bytes in the middle.
    Zero,
    /// Keeps the first half.
    Cut,
    Empty,
    Delete,
}

const HARMS: [Harm; 7] =
    [Harm::Flip(0), Harm::Flip(2), Harm::Flip(5), Harm::Zero, Harm::Cut, Harm::Empty, Harm::Delete];

/// `verify.rs` damages every object of a store; three ways are enough here.
const HARMS_OF_OBJECTS: [Harm; 3] = [Harm::Flip(2), Harm::Cut, Harm::Delete];

impl Harm {
    fn apply(self, file: &Path) {
        let mut bytes = std::fs::read(file).unwrap();
        let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        match self {
            Harm::Flip(part) if used > 0 => bytes[used * part / 8] ^= 4,
            Harm::Zero => {
                let middle = used / 2;
                bytes[middle..used.min(middle + 64)].fill(0);
            }
            Harm::Cut => bytes.truncate(used / 2),
            Harm::Flip(_) | Harm::Empty => bytes.clear(),
            Harm::Delete => return std::fs::remove_file(file).unwrap(),
        }
        std::fs::write(file, bytes).unwrap();
    }
}

/// The part of the path that a report must contain.
fn name_in_messages(file: &Path) -> String {
    let name = file.to_str().unwrap();
    name.strip_prefix("store/").unwrap_or(name).to_owned()
}

/// Damages a file in a copy. Returns the error of the start or of a client, or `None` if all data are there.
async fn damage_is_reported_or_harmless(good: &Rig, file: &Path, harm: Harm) -> Option<String> {
    let trial = good.copy();
    harm.apply(&trial.data().join(file));
    let reported = match trial.read().await {
        Ok(found) => {
            assert_eq!(found, good.contents, "{harm:?} {}: lost without an error", file.display());
            return None;
        }
        Err(reported) => reported,
    };
    assert!(reported.contains(&name_in_messages(file)), "{harm:?} {}: {reported}", file.display());
    trial.restore(good, file);
    let restored = trial.read().await;
    assert_eq!(restored.as_ref(), Ok(&good.contents), "{harm:?} {}: after {reported}", file.display());
    Some(reported)
}

/// Damages all files in all ways, and returns the number of damages that were reported for each.
async fn damage_all(good: &Rig) -> Vec<(String, usize)> {
    let mut counts = Vec::new();
    for file in good.files() {
        let mut count = 0;
        let harms = if file.starts_with("store") { &HARMS_OF_OBJECTS[..] } else { &HARMS };
        for harm in harms {
            count += usize::from(damage_is_reported_or_harmless(good, &file, *harm).await.is_some());
        }
        counts.push((file.to_str().unwrap().to_owned(), count));
    }
    counts
}

fn count_of(counts: &[(String, usize)], file: &str) -> usize {
    counts.iter().find(|(name, _)| name == file).unwrap_or_else(|| panic!("{file}: {counts:?}")).1
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_kill_damage_of_each_file_is_reported_or_harmless() {
    let good = rig(Signal::KILL).await;
    let counts = damage_all(&good).await;
    assert_eq!(count_of(&counts, "meta.db-wal"), HARMS.len());
    assert!(count_of(&counts, "meta.head") >= 3, "{counts:?}");
    assert!(
        counts.iter().any(|(name, count)| name.starts_with("log/") && *count == HARMS.len()),
        "{counts:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_stop_damage_of_each_file_is_reported_or_harmless() {
    let good = rig(Signal::TERM).await;
    let counts = damage_all(&good).await;
    assert!(!counts.iter().any(|(name, _)| name == "meta.db-wal"));
    assert!(count_of(&counts, "meta.db") >= 4, "{counts:?}");
    assert_eq!(count_of(&counts, "store/owner"), HARMS_OF_OBJECTS.len());
    for kind in ["store/segments/", "store/manifests/"] {
        assert!(
            counts.iter().any(|(name, count)| name.starts_with(kind) && *count >= 2),
            "{kind} {counts:?}"
        );
    }
}
