//! Catalogs as objects of a store: `catalog/000000000000000c`, by their numbers. The greatest is the newest, and the others
//! are garbage.

use fulmar_pages::StoredCatalog;

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
    /// The numbers of the catalogs that there are, in their order.
    pub async fn list_catalogs(&self) -> Result<Vec<u64>, StoreError> {
        let mut numbers: Vec<u64> =
            self.list(CATALOGS).await?.iter().filter_map(|name| parse(name)).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Stores a catalog under its number. [`StoreError::Exists`] if another one has that number.
    pub async fn put_catalog(&self, catalog: &StoredCatalog) -> Result<(), StoreError> {
        self.put(&catalog_object(catalog.number), catalog.encode().into()).await
    }

    /// Reads a catalog.
    pub async fn read_catalog(&self, number: u64) -> Result<StoredCatalog, StoreError> {
        let object = catalog_object(number);
        let bytes = self.get(&object, Span::Whole).await?.bytes;
        // What is read is acted upon: whoever has put it may have died before it was durable.
        let synced = self.store.sync(&object).await;
        synced.map_err(|failure| StoreError::failed("sync", &object, &self.store, failure))?;
        let catalog = StoredCatalog::decode(&bytes).map_err(|cause| self.damaged_at(&object, 0, cause))?;
        match catalog.number == number {
            true => Ok(catalog),
            false => Err(StoreError::Misnamed { object, store: self.store.to_string() }),
        }
    }

    /// Deletes a catalog; no error if there is none.
    pub async fn delete_catalog(&self, number: u64) -> Result<(), StoreError> {
        self.delete(&catalog_object(number)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_numbers_and_nothing_else() {
        assert_eq!(parse(&catalog_object(0xc0ffee)), Some(0xc0ffee));
        for other in
            ["catalog/1", "catalog/000000000000000G", "catalog/x/0000000000000001", "logs/0000000000000001"]
        {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
