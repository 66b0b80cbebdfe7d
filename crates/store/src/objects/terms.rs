//! Ownership of the store: terms as fencing tokens, stored as objects `terms/00000007` and, after a
//! clean stop, `terms/00000007-ended`.
//!
//! ```text
//!   terms/00000006-ended                     starts term 7: puts terms/00000007 if absent,
//!                                            lists again; if it is the greatest,
//!                                            deletes earlier ones
//! ```
//!
//! A number that was used and deleted can be won again by a process with an old listing. A number
//! therefore counts only if a listing that started after it was won shows no greater one. (Earlier
//! numbers are deleted only by the owner of a greater one.)
//!
//! From the first start on, the object of the last term always exists. If it has been deleted, its
//! owner cannot know whether it still owns the store, and reports this. The next start derives the
//! earlier terms from the names of segments and manifests.
//!
//! Starting a term takes the store away from the owner of the previous term, which is not asked and
//! may not notice for some time. Operations that only the owner may perform therefore follow this
//! rule: *list, check that the term is still the last one, then act on the listing*. All listed
//! objects then existed while the process owned the store. `maintenance/collect` explains why
//! acting on the listing later is safe.

use std::time::Duration;

use fulmar_pages::{StoredTerm, TermState};

use super::{PageStore, StoreError};
use crate::store::Span;

const TERMS: &str = "terms";
const ENDED: &str = "-ended";
/// Number of lost races for a term after which an open fails.
const MAX_ROUNDS: usize = 50;

/// The greatest number of a term.
pub const MAX_TERM: u32 = (1 << 23) - 1;

/// Version numbers contain their term above this many bits.
pub const VERSION_BITS: u32 = 40;

/// A term that this process has started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Term {
    /// Number of the term.
    pub number: u32,
    by: u128,
    /// How long, from the start of the term, operations of earlier terms may still take effect.
    /// None if the previous process did not record a clean stop.
    pub quiet_period: Option<Duration>,
}

fn term_object(number: u32, has_ended: bool) -> String {
    format!("{TERMS}/{number:08x}{}", if has_ended { ENDED } else { "" })
}

/// Parses the number, and whether the object records the end of the term.
fn parse(object: &str) -> Option<(u32, bool)> {
    let name = object.rsplit('/').next()?;
    let (digits, has_ended) = name.strip_suffix(ENDED).map_or((name, false), |digits| (digits, true));
    let number = u32::from_str_radix(digits, 16).ok()?;
    (term_object(number, has_ended) == object).then_some((number, has_ended))
}

impl PageStore {
    /// Takes over the store from its current owner.
    pub async fn start_term(&self) -> Result<Term, StoreError> {
        let by = rand::random();
        for _ in 0..MAX_ROUNDS {
            let before = self.list_terms().await?;
            let (last, has_ended) = match before.last() {
                Some(last) => *last,
                None => (self.greatest_named_term().await?, false),
            };
            if last >= MAX_TERM {
                return Err(StoreError::TooManyTerms { store: self.store.to_string() });
            }
            let number = last + 1;
            let begun = StoredTerm { number, by, state: TermState::Begun };
            match self.put(&term_object(number, false), begun.encode().into()).await {
                Ok(()) => {}
                Err(StoreError::Exists { .. }) => continue,
                Err(error) => return Err(error),
            }
            let known = self.list_terms().await?;
            if known.last() == Some(&(number, false)) {
                let quiet_period = self.recorded_wait(last, has_ended).await?;
                for (number, has_ended) in known.into_iter().filter(|known| known.0 < number) {
                    self.delete(&term_object(number, has_ended)).await?;
                }
                return Ok(Term { number, by, quiet_period });
            }
        }
        Err(StoreError::Contended { object: TERMS.to_owned(), store: self.store.to_string() })
    }

    /// Returns the greatest term in the names of segments and manifests. 0 if there are none, or
    /// all are older than the introduction of terms.
    async fn greatest_named_term(&self) -> Result<u32, StoreError> {
        let of_segments = self.list_segments().await?.into_iter().map(|id| id.term());
        let of_manifests =
            self.list_manifests(None).await?.into_iter().map(|name| (name.number >> VERSION_BITS) as u32);
        // Names of segments from before the introduction of terms are completely random.
        Ok(of_segments.chain(of_manifests).filter(|term| *term <= MAX_TERM).max().unwrap_or(0))
    }

    /// Returns the waiting time that the end of a term records. Nothing precedes the first term.
    async fn recorded_wait(&self, last: u32, has_ended: bool) -> Result<Option<Duration>, StoreError> {
        if last == 0 {
            return Ok(Some(Duration::ZERO));
        }
        if !has_ended {
            return Ok(None);
        }
        match self.read_term(last, true).await {
            Ok(StoredTerm { state: TermState::Ended { wait_ms }, .. }) => {
                Ok(Some(Duration::from_millis(wait_ms)))
            }
            // Another process has started a term in the meantime, or the time is unknown.
            Ok(_)
            | Err(
                StoreError::Missing { .. } | StoreError::Damaged { .. } | StoreError::WrongIdentity { .. },
            ) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns true if no later term was started. [`StoreError::Missing`] if that cannot be known,
    /// because the object of this term was deleted.
    pub async fn is_last_term(&self, term: &Term) -> Result<bool, StoreError> {
        match self.list_terms().await?.last() {
            Some((number, _)) if *number >= term.number => Ok(*number == term.number),
            _ => {
                let object = term_object(term.number, false);
                Err(StoreError::Missing { object, store: self.store.to_string() })
            }
        }
    }

    /// Records that this process sends no more operations to the store. Earlier operations may
    /// still take effect for `wait`.
    pub async fn end_term(&self, term: &Term, wait: Duration) -> Result<(), StoreError> {
        let state = TermState::Ended { wait_ms: wait.as_millis() as u64 };
        let ended = StoredTerm { number: term.number, by: term.by, state };
        self.put(&term_object(term.number, true), ended.encode().into()).await
    }

    /// Reads the object that records the start or the end of a term.
    pub async fn read_term(&self, number: u32, has_ended: bool) -> Result<StoredTerm, StoreError> {
        let object = term_object(number, has_ended);
        let bytes = self.get(&object, Span::Whole).await?.bytes;
        let term = StoredTerm::decode(&bytes).map_err(|cause| self.damaged_at(&object, 0, cause))?;
        match (term.number, term.state != TermState::Begun) == (number, has_ended) {
            true => Ok(term),
            false => Err(StoreError::WrongIdentity { object, store: self.store.to_string() }),
        }
    }

    /// Checks that none of these terms ([`PageStore::list_terms`]) is missing, as far as that can
    /// be detected: the last ended term, and the term of the newest `written` data, must have been
    /// started.
    pub fn check_terms(&self, terms: &[(u32, bool)], written: u32) -> Result<(), StoreError> {
        let last = terms.last().map_or(0, |(number, _)| *number).max(written);
        match last == 0 || terms.contains(&(last, false)) {
            true => Ok(()),
            false => {
                Err(StoreError::Missing { object: term_object(last, false), store: self.store.to_string() })
            }
        }
    }

    /// Lists the objects of terms, sorted: the number, and true for the end of a term.
    pub async fn list_terms(&self) -> Result<Vec<(u32, bool)>, StoreError> {
        let mut terms: Vec<_> = self.list(TERMS).await?.iter().filter_map(|name| parse(name)).collect();
        terms.sort_unstable();
        Ok(terms)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fulmar_pages::PartitionId;

    use super::super::ManifestName;
    use super::super::testing::empty_manifest;
    use super::*;
    use crate::store::Backend;

    fn store() -> PageStore {
        PageStore::open(Arc::new(Backend::memory()))
    }

    #[test]
    fn only_canonical_names_are_parsed() {
        for (number, has_ended) in [(7, false), (7, true), (MAX_TERM, false)] {
            assert_eq!(parse(&term_object(number, has_ended)), Some((number, has_ended)));
        }
        for other in ["terms/7", "terms/0000000G", "terms/00000007-end", "logs/00000007", "terms/-ended"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[tokio::test]
    async fn last_term_owns_the_store() {
        let store = store();
        let first = store.start_term().await.unwrap();
        assert!(first.quiet_period == Some(Duration::ZERO) && store.is_last_term(&first).await.unwrap());
        let second = store.start_term().await.unwrap();
        assert_eq!(second.quiet_period, None, "the first term has no recorded end");
        assert!(second.number > first.number);
        assert!(!store.is_last_term(&first).await.unwrap() && store.is_last_term(&second).await.unwrap());
        let hour = Duration::from_secs(3600);
        store.end_term(&second, hour).await.unwrap();
        assert!(store.is_last_term(&second).await.unwrap());
        assert_ne!(store.read_term(second.number, true).await.unwrap().state, TermState::Begun);
        let third = store.start_term().await.unwrap();
        assert_eq!(third.quiet_period, Some(hour));
        assert_eq!(
            store.list_terms().await.unwrap(),
            [(third.number, false)],
            "earlier terms must be deleted"
        );
        // A stale process records the end of its term.
        store.end_term(&first, Duration::ZERO).await.unwrap();
        assert!(!store.is_last_term(&first).await.unwrap());
        assert_eq!(
            store.start_term().await.unwrap().quiet_period,
            None,
            "the end of an earlier term must not count for the third"
        );
    }

    /// Of concurrent starts, only the one with the greatest number remains the owner, and all
    /// numbers differ.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn concurrent_starts_have_one_owner() {
        let store = store();
        let all = (0..8).map(|_| {
            let store = store.clone();
            tokio::spawn(async move { store.start_term().await.unwrap() })
        });
        let mut begun = Vec::new();
        for one in all.collect::<Vec<_>>() {
            begun.push(one.await.unwrap());
        }
        let mut last = Vec::new();
        for term in &begun {
            last.extend(store.is_last_term(term).await.unwrap().then_some(term.number));
        }
        assert_eq!(last, [begun.iter().map(|term| term.number).max().unwrap()]);
        begun.sort_unstable_by_key(|term| term.number);
        begun.dedup_by_key(|term| term.number);
        assert_eq!(begun.len(), 8);
    }

    #[tokio::test]
    async fn deleted_term_is_detected_and_its_number_is_not_reused() {
        let store = store();
        for _ in 0..4 {
            store.start_term().await.unwrap();
        }
        let fifth = store.start_term().await.unwrap();
        let object = term_object(fifth.number, false);
        let number = u64::from(fifth.number) << VERSION_BITS | 7;
        let name = ManifestName { partition: PartitionId(3), epoch: 1, number };
        store.put_manifest(&empty_manifest(name)).await.unwrap();
        store.delete(&object).await.unwrap();
        let asked = store.is_last_term(&fifth).await;
        assert!(
            matches!(&asked, Err(StoreError::Missing { object: named, .. }) if *named == object),
            "{asked:?}"
        );
        // A reappeared end of an earlier term proves nothing about this one.
        store.end_term(&Term { number: 2, by: 1, quiet_period: None }, Duration::ZERO).await.unwrap();
        assert!(store.is_last_term(&fifth).await.is_err());
        store.delete(&term_object(2, true)).await.unwrap();

        let next = store.start_term().await.unwrap();
        assert_eq!((next.number, next.quiet_period), (fifth.number + 1, None));
        assert!(!store.is_last_term(&fifth).await.unwrap());
    }

    #[tokio::test]
    async fn missing_term_is_detected_from_written_data() {
        let store = store();
        let check = async |written| store.check_terms(&store.list_terms().await.unwrap(), written);
        check(0).await.unwrap();
        let first = store.start_term().await.unwrap();
        check(0).await.unwrap();
        check(1).await.unwrap();
        assert!(
            matches!(check(2).await, Err(StoreError::Missing { object, .. }) if object == term_object(2, false))
        );
        store.end_term(&first, Duration::ZERO).await.unwrap();
        check(1).await.unwrap();
        store.delete(&term_object(1, false)).await.unwrap();
        assert!(
            matches!(check(0).await, Err(StoreError::Missing { object, .. }) if object == term_object(1, false))
        );
    }

    #[tokio::test]
    async fn start_after_the_greatest_term_is_rejected() {
        let store = store();
        let last = StoredTerm { number: MAX_TERM, by: 1, state: TermState::Begun };
        store.put(&term_object(MAX_TERM, false), last.encode().into()).await.unwrap();
        assert!(matches!(store.start_term().await, Err(StoreError::TooManyTerms { .. })));
    }
}
