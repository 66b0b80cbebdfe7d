//! Validates `--disk-cache`, the size of the disk cache for a remote store.

use anyhow::ensure;
use fulmar_store::StoreUrl;

use crate::size::Bytes;

/// A smaller cache would be replaced completely by one flush or scan.
const MIN_CACHE: Bytes = Bytes(64 << 20);

/// Returns the size of the cache in bytes, 0 for none.
pub fn bytes(requested: Option<Bytes>, store: Option<&StoreUrl>) -> anyhow::Result<u64> {
    let Some(requested) = requested.filter(|requested| requested.0 > 0) else { return Ok(0) };
    ensure!(
        !matches!(store, None | Some(StoreUrl::Directory(_))),
        "--disk-cache requires an S3 store, because the operating system already caches reads of a \
         directory; remove it, or use --store s3://bucket/prefix"
    );
    ensure!(
        requested >= MIN_CACHE,
        "--disk-cache {requested} is too small; use at least {MIN_CACHE}, or remove it"
    );
    Ok(requested.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_cache_requires_an_s3_store_and_a_minimum_size() {
        let s3: StoreUrl = "s3://bucket/prefix".parse().unwrap();
        let directory: StoreUrl = "file:///store".parse().unwrap();
        assert_eq!(bytes(None, None).unwrap(), 0);
        assert_eq!(bytes(Some(Bytes(0)), Some(&directory)).unwrap(), 0);
        assert_eq!(bytes(Some(MIN_CACHE), Some(&s3)).unwrap(), 64 << 20);
        for (requested, store, expected) in [
            (MIN_CACHE, None, "requires an S3 store"),
            (MIN_CACHE, Some(&directory), "requires an S3 store"),
            (Bytes(1 << 20), Some(&s3), "use at least 64.0 MiB"),
        ] {
            let error = bytes(Some(requested), store).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
