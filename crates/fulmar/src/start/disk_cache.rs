//! How much of the disk a cache of the store may take, and whether there is a use for one.

use anyhow::ensure;
use fulmar_store::StoreUrl;

use crate::size::Bytes;

/// With less, a flush or a scan would replace all of it.
const LEAST: Bytes = Bytes(64 << 20);

/// What was asked for; 0 for none.
pub fn bytes(asked: Option<Bytes>, store: Option<&StoreUrl>) -> anyhow::Result<u64> {
    let Some(asked) = asked.filter(|asked| asked.0 > 0) else { return Ok(0) };
    ensure!(
        !matches!(store, None | Some(StoreUrl::Directory(_))),
        "--disk-cache is for a store in S3: what is read from a directory the system keeps in memory by itself; leave it \
         out, or choose a store with --store s3://bucket/prefix"
    );
    ensure!(asked >= LEAST, "--disk-cache {asked} is too little; give at least {LEAST}, or leave it out");
    Ok(asked.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_of_some_size_before_a_store_that_is_far() {
        let s3: StoreUrl = "s3://bucket/prefix".parse().unwrap();
        let directory: StoreUrl = "file:///store".parse().unwrap();
        assert_eq!(bytes(None, None).unwrap(), 0);
        assert_eq!(bytes(Some(Bytes(0)), Some(&directory)).unwrap(), 0);
        assert_eq!(bytes(Some(LEAST), Some(&s3)).unwrap(), 64 << 20);
        for (asked, store, why) in [
            (LEAST, None, "is for a store in S3"),
            (LEAST, Some(&directory), "is for a store in S3"),
            (Bytes(1 << 20), Some(&s3), "give at least 64.0 MiB"),
        ] {
            let refused = bytes(Some(asked), store).unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        }
    }
}
