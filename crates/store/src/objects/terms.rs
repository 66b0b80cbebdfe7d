//! Who owns the store now: terms as objects, `terms/00000007` and, when its process has ended well, `terms/00000007-ended`.
//!
//! ```text
//!   terms/00000006-ended                     begins term 7: puts terms/00000007, if it is absent,
//!                                            lists anew: is that the greatest? then deletes what is before
//! ```
//!
//! A number that was used and deleted may be won again by who has looked long ago; so nobody trusts a number before a listing
//! that began after it was won shows none that is greater. (Those before are deleted only by who holds a greater one.)
//!
//! The last one is there always, from the first start on. Should somebody have deleted it, its owner cannot know whether it is one still, and
//! says so; whoever begins the next one finds in the names of segments and manifests which terms there have been.
//!
//! Beginning a term takes the store away from whoever holds the one before. He is not asked, and may not know it for a while. So
//! what only the owner may do is done by this rule: *list, look whether the term is still the last one, then act on what was listed*.
//! Then everything that was listed had been there, and was known, while the store was his; see `engine/collect` for
//! why acting on it later does no harm.

use std::time::Duration;

use fulmar_pages::{StoredTerm, TermState};

use super::{PageStore, StoreError};
use crate::store::Span;

const TERMS: &str = "terms";
const ENDED: &str = "-ended";
/// Others that begin a term at the same time, before they are held to be in the way for good.
const MOST_ROUNDS: usize = 50;

/// The greatest number of a term.
pub const MOST_TERMS: u32 = (1 << 23) - 1;

/// Versions' numbers have the term in which they were made above so many bits.
pub const VERSION_BITS: u32 = 40;

/// A term that this process has begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Term {
    /// Which one.
    pub number: u32,
    by: u128,
    /// For how long from its beginning something of earlier terms may still arrive; `None` if the process before has not said that it has
    /// ended.
    pub wait: Option<Duration>,
}

fn term_object(number: u32, has_ended: bool) -> String {
    format!("{TERMS}/{number:08x}{}", if has_ended { ENDED } else { "" })
}

/// The number, and whether the object says that the term has ended.
fn parse(object: &str) -> Option<(u32, bool)> {
    let name = object.rsplit('/').next()?;
    let (digits, has_ended) = name.strip_suffix(ENDED).map_or((name, false), |digits| (digits, true));
    let number = u32::from_str_radix(digits, 16).ok()?;
    (term_object(number, has_ended) == object).then_some((number, has_ended))
}

impl PageStore {
    /// Takes the store over from whoever has it.
    pub async fn begin_term(&self) -> Result<Term, StoreError> {
        let by = rand::random();
        for _ in 0..MOST_ROUNDS {
            let before = self.list_terms().await?;
            let (last, has_ended) = match before.last() {
                Some(last) => *last,
                None => (self.greatest_named_term().await?, false),
            };
            if last >= MOST_TERMS {
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
                let wait = self.wait_of(last, has_ended).await?;
                for (number, has_ended) in known.into_iter().filter(|known| known.0 < number) {
                    self.delete(&term_object(number, has_ended)).await?;
                }
                return Ok(Term { number, by, wait });
            }
        }
        Err(StoreError::Contended { object: TERMS.to_owned(), store: self.store.to_string() })
    }

    /// The greatest term that segments and manifests are of; 0: there are none, or they are from before there were terms.
    async fn greatest_named_term(&self) -> Result<u32, StoreError> {
        let of_segments = self.list_segments().await?.into_iter().map(|id| id.term());
        let of_manifests =
            self.list_manifests(None).await?.into_iter().map(|name| (name.number >> VERSION_BITS) as u32);
        // Before there were terms all bits of a segment's name were random.
        Ok(of_segments.chain(of_manifests).filter(|term| *term <= MOST_TERMS).max().unwrap_or(0))
    }

    /// What the end of a term says of those before it. Before the first there was none.
    async fn wait_of(&self, last: u32, has_ended: bool) -> Result<Option<Duration>, StoreError> {
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
            // Somebody else has begun a term meanwhile; or nobody knows.
            Ok(_)
            | Err(StoreError::Missing { .. } | StoreError::Damaged { .. } | StoreError::Misnamed { .. }) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Whether nobody has begun a later term. [`StoreError::Missing`] if that cannot be known, because somebody has deleted what says that
    /// this one has begun.
    pub async fn is_last_term(&self, term: &Term) -> Result<bool, StoreError> {
        match self.list_terms().await?.last() {
            Some((number, _)) if *number >= term.number => Ok(*number == term.number),
            _ => {
                let object = term_object(term.number, false);
                Err(StoreError::Missing { object, store: self.store.to_string() })
            }
        }
    }

    /// Says that this process asks nothing more of the store; for `wait` something of those before it may still arrive.
    pub async fn end_term(&self, term: &Term, wait: Duration) -> Result<(), StoreError> {
        let state = TermState::Ended { wait_ms: wait.as_millis() as u64 };
        let ended = StoredTerm { number: term.number, by: term.by, state };
        self.put(&term_object(term.number, true), ended.encode().into()).await
    }

    /// Reads the object that says that a term has begun, or ended.
    pub async fn read_term(&self, number: u32, has_ended: bool) -> Result<StoredTerm, StoreError> {
        let object = term_object(number, has_ended);
        let bytes = self.get(&object, Span::Whole).await?.bytes;
        let term = StoredTerm::decode(&bytes).map_err(|cause| self.damaged_at(&object, 0, cause))?;
        match (term.number, term.state != TermState::Begun) == (number, has_ended) {
            true => Ok(term),
            false => Err(StoreError::Misnamed { object, store: self.store.to_string() }),
        }
    }

    /// Checks that none of these terms ([`PageStore::list_terms`]) is missing, as far as one can know: the last one that has ended has
    /// begun, and so has that in which something was `written`.
    pub fn check_terms(&self, terms: &[(u32, bool)], written: u32) -> Result<(), StoreError> {
        let last = terms.last().map_or(0, |(number, _)| *number).max(written);
        match last == 0 || terms.contains(&(last, false)) {
            true => Ok(()),
            false => {
                Err(StoreError::Missing { object: term_object(last, false), store: self.store.to_string() })
            }
        }
    }

    /// The objects that say that terms have begun or ended: numbers, and whether it is the latter; sorted.
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
    fn names_are_numbers_and_nothing_else() {
        for (number, has_ended) in [(7, false), (7, true), (MOST_TERMS, false)] {
            assert_eq!(parse(&term_object(number, has_ended)), Some((number, has_ended)));
        }
        for other in ["terms/7", "terms/0000000G", "terms/00000007-end", "logs/00000007", "terms/-ended"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[tokio::test]
    async fn the_last_one_has_the_store() {
        let store = store();
        let first = store.begin_term().await.unwrap();
        assert!(first.wait == Some(Duration::ZERO) && store.is_last_term(&first).await.unwrap());
        let second = store.begin_term().await.unwrap();
        assert_eq!(second.wait, None, "the first one has not ended");
        assert!(second.number > first.number);
        assert!(!store.is_last_term(&first).await.unwrap() && store.is_last_term(&second).await.unwrap());
        let hour = Duration::from_secs(3600);
        store.end_term(&second, hour).await.unwrap();
        assert!(store.is_last_term(&second).await.unwrap());
        assert_ne!(store.read_term(second.number, true).await.unwrap().state, TermState::Begun);
        let third = store.begin_term().await.unwrap();
        assert_eq!(third.wait, Some(hour));
        assert_eq!(store.list_terms().await.unwrap(), [(third.number, false)], "the others are deleted");
        // Who was away for long.
        store.end_term(&first, Duration::ZERO).await.unwrap();
        assert!(!store.is_last_term(&first).await.unwrap());
        assert_eq!(store.begin_term().await.unwrap().wait, None, "that says nothing of the third");
    }

    /// Of many at a time each believes at most for as long as no later one has begun, and each number is one's.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn of_many_one_is_the_last() {
        let store = store();
        let all = (0..8).map(|_| {
            let store = store.clone();
            tokio::spawn(async move { store.begin_term().await.unwrap() })
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
    async fn one_that_was_deleted_is_missed_and_its_number_is_not_used_again() {
        let store = store();
        for _ in 0..4 {
            store.begin_term().await.unwrap();
        }
        let fifth = store.begin_term().await.unwrap();
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
        // One of an earlier owner's that has come back says nothing of this one.
        store.end_term(&Term { number: 2, by: 1, wait: None }, Duration::ZERO).await.unwrap();
        assert!(store.is_last_term(&fifth).await.is_err());
        store.delete(&term_object(2, true)).await.unwrap();

        let next = store.begin_term().await.unwrap();
        assert_eq!((next.number, next.wait), (fifth.number + 1, None));
        assert!(!store.is_last_term(&fifth).await.unwrap());
    }

    #[tokio::test]
    async fn one_that_is_missing_is_known_by_what_came_of_it() {
        let store = store();
        let check = async |written| store.check_terms(&store.list_terms().await.unwrap(), written);
        check(0).await.unwrap();
        let first = store.begin_term().await.unwrap();
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
    async fn there_is_an_end_to_them() {
        let store = store();
        let last = StoredTerm { number: MOST_TERMS, by: 1, state: TermState::Begun };
        store.put(&term_object(MOST_TERMS, false), last.encode().into()).await.unwrap();
        assert!(matches!(store.begin_term().await, Err(StoreError::TooManyTerms { .. })));
    }
}
