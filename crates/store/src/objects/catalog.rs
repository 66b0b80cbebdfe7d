//! Catalogs as objects of a store, named by number: `catalog/000007000000000c`.
//!
//! The catalog with the greatest number is the newest; the others are garbage. Like version
//! numbers, the numbers contain the writer's term in their upper bits, so that all numbers of a
//! term are less than all numbers of the next.

use fulmar_pages::StoredCatalog;

use super::terms::VERSION_BITS;
use super::{PageStore, StoreError};
use crate::store::{Span, Store};

const CATALOGS: &str = "catalog";

fn catalog_object(number: u64) -> String {
    format!("{CATALOGS}/{number:016x}")
}

fn parse(object: &str) -> Option<u64> {
    let number = u64::from_str_radix(object.rsplit('/').next()?, 16).ok()?;
    (catalog_object(number) == object).then_some(number)
}

impl PageStore {
    /// Lists the numbers of all catalogs, sorted.
    pub async fn list_catalogs(&self) -> Result<Vec<u64>, StoreError> {
        let mut numbers: Vec<u64> =
            self.list(CATALOGS).await?.iter().filter_map(|name| parse(name)).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Returns the number, in this process's term, for a catalog after `newest`. Returns None if
    /// `newest` belongs to a later term: then another process owns the store.
    pub fn next_catalog(&self, newest: u64) -> Option<u64> {
        let next = newest.checked_add(1)?.max(u64::from(self.term) << VERSION_BITS);
        // Without a term, no other process can own the store.
        (self.term == 0 || next >> VERSION_BITS == u64::from(self.term)).then_some(next)
    }

    /// Returns true if the catalog belongs to this process's term.
    pub fn is_catalog_of_this_term(&self, number: u64) -> bool {
        self.term == 0 || number >> VERSION_BITS == u64::from(self.term)
    }

    /// Stores a catalog. [`StoreError::Exists`] if another one has the same number.
    pub async fn put_catalog(&self, catalog: &StoredCatalog) -> Result<(), StoreError> {
        self.put(&catalog_object(catalog.number), catalog.encode().into()).await
    }

    /// Reads a catalog.
    pub async fn read_catalog(&self, number: u64) -> Result<StoredCatalog, StoreError> {
        let object = catalog_object(number);
        let bytes = self.get(&object, Span::Whole).await?.bytes;
        // Synced because the caller relies on it: its writer may have died before it was durable.
        let synced = self.store.sync(&object).await;
        synced.map_err(|failure| StoreError::failed("sync", &object, &self.store, failure))?;
        let catalog = StoredCatalog::decode(&bytes).map_err(|cause| self.damaged_at(&object, 0, cause))?;
        match catalog.number == number {
            true => Ok(catalog),
            false => Err(StoreError::WrongIdentity { object, store: self.store.to_string() }),
        }
    }

    /// Deletes a catalog. Succeeds if it does not exist.
    pub async fn delete_catalog(&self, number: u64) -> Result<(), StoreError> {
        self.delete(&catalog_object(number)).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::store::Backend;

    #[tokio::test]
    async fn numbers_of_a_term_are_less_than_those_of_the_next() {
        let store = PageStore::open(Arc::new(Backend::memory()));
        assert_eq!((store.next_catalog(0), store.next_catalog(41)), (Some(1), Some(42)));
        let (first, second) = (store.start_term().await.unwrap(), store.start_term().await.unwrap());
        let (first, second) = (store.clone().in_term(&first), store.clone().in_term(&second));
        let of_first = first.next_catalog(41).unwrap();
        assert_eq!(of_first, 1 << VERSION_BITS);
        assert_eq!(first.next_catalog(of_first), Some(of_first + 1));
        let of_second = second.next_catalog(of_first + 7).unwrap();
        assert_eq!(of_second, 2 << VERSION_BITS);
        assert_eq!(first.next_catalog(of_second), None, "a fenced process must not get a number");
        assert_eq!(
            first.next_catalog(of_second - 1),
            None,
            "a term whose numbers are used up must not get another"
        );
        assert!(second.is_catalog_of_this_term(of_second) && !second.is_catalog_of_this_term(of_first));
        // A copy of such a store without a term.
        assert_eq!(store.next_catalog(of_second), Some(of_second + 1));
        assert_eq!(store.next_catalog(u64::MAX), None);
    }

    #[test]
    fn only_canonical_names_are_parsed() {
        assert_eq!(parse(&catalog_object(0xc0ffee)), Some(0xc0ffee));
        for other in
            ["catalog/1", "catalog/000000000000000G", "catalog/x/0000000000000001", "logs/0000000000000001"]
        {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
