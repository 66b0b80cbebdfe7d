//! Reads one page of an S3 listing, skipping empty pages.
//!
//! ```text
//!   start-after the last name -> 1,000 names, token     the caller continues after the last name
//!                             -> no names,    token     the token is followed here
//!                             -> names or none          the end
//! ```
//!
//! Callers continue a listing after the last name of a page ([`super::Listing`]): a listing can
//! then be resumed at any time, and stores need not keep state. A page without names has no last
//! name. Servers return such pages, with a token for the next one, if a range of names consists of
//! deleted objects that they still keep (versions, delete markers). Only the token continues such a
//! listing. Treating the page as the end would be wrong: the garbage collector would consider the
//! remaining objects missing, and a search for the newest manifest would find an older one.
//!
//! An empty token counts as none: some servers always send the element, and the library reads it in
//! the same way.

use object_store::ObjectMeta;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;

use super::backend::{no_bucket, s3_failure};
use super::{Failure, FailureKind};

/// Number of successive empty pages after which the server is considered to be in a loop. The time
/// limit of an attempt is usually reached earlier.
const MAX_EMPTY_PAGES: usize = 1000;

/// Returns the objects below a directory that come after `after`, and whether there may be more. In
/// that case there is at least one object.
pub(super) async fn page(
    server: &dyn PaginatedListStore,
    directory: &Path,
    after: Option<&Path>,
) -> Result<(Vec<ObjectMeta>, bool), Failure> {
    let prefix = format!("{directory}/");
    let mut page_token = None;
    for _ in 0..MAX_EMPTY_PAGES {
        let offset = after.map(ToString::to_string);
        let options = PaginatedListOptions { offset, page_token, ..PaginatedListOptions::default() };
        let page = server.list_paginated(Some(&prefix), options).await;
        let page = page.map_err(|cause| no_bucket(s3_failure(&cause)))?;
        page_token = page.page_token.filter(|token| !token.is_empty());
        if page_token.is_none() || !page.result.objects.is_empty() {
            return Ok((page.result.objects, page_token.is_some()));
        }
    }
    let cause = format!("{MAX_EMPTY_PAGES} successive pages of a listing are empty but not the last");
    Err(Failure::new(FailureKind::Unavailable, cause))
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use object_store::ListResult;
    use object_store::list::PaginatedListResult;
    use parking_lot::Mutex;

    use super::*;

    /// A server with these pages: names, and the token for the next page.
    struct Pages {
        pages: Vec<(Vec<&'static str>, Option<&'static str>)>,
        /// The token and the start-after name of each request.
        requests: Mutex<Vec<(Option<String>, Option<String>)>>,
    }

    impl Pages {
        fn of(pages: &[(&[&'static str], Option<&'static str>)]) -> Pages {
            let pages = pages.iter().map(|(names, token)| (names.to_vec(), *token)).collect();
            Pages { pages, requests: Mutex::default() }
        }
    }

    #[async_trait]
    impl PaginatedListStore for Pages {
        async fn list_paginated(
            &self,
            prefix: Option<&str>,
            options: PaginatedListOptions,
        ) -> object_store::Result<PaginatedListResult> {
            assert_eq!(prefix, Some("d/"));
            let mut requests = self.requests.lock();
            let (names, token) = &self.pages[requests.len() % self.pages.len()];
            requests.push((options.page_token, options.offset));
            let object = |name: &&str| ObjectMeta {
                location: Path::from(*name),
                last_modified: std::time::SystemTime::UNIX_EPOCH.into(),
                size: 1,
                e_tag: None,
                version: None,
            };
            let result = ListResult {
                common_prefixes: Vec::new(),
                objects: names.iter().map(object).collect(),
                extensions: Default::default(),
            };
            Ok(PaginatedListResult { result, page_token: token.map(str::to_owned) })
        }
    }

    async fn of(server: &Pages) -> (Vec<String>, bool) {
        let (objects, more) = page(server, &Path::from("d"), Some(&Path::from("d/0"))).await.unwrap();
        (objects.into_iter().map(|object| object.location.to_string()).collect(), more)
    }

    #[tokio::test]
    async fn empty_page_with_a_token_is_not_the_end() {
        let server = Pages::of(&[(&[], Some("1")), (&[], Some("2")), (&["d/a"], Some("3"))]);
        assert_eq!(of(&server).await, (vec!["d/a".to_owned()], true));
        let start = Some("d/0".to_owned());
        let requests = [None, Some("1"), Some("2")].map(|token| (token.map(str::to_owned), start.clone()));
        assert_eq!(*server.requests.lock(), requests);
    }

    #[tokio::test]
    async fn page_without_a_token_is_the_end() {
        for end in [None, Some("")] {
            assert_eq!(of(&Pages::of(&[(&[], end)])).await, (Vec::new(), false));
            assert_eq!(of(&Pages::of(&[(&["d/a"], end)])).await, (vec!["d/a".to_owned()], false));
            assert_eq!(of(&Pages::of(&[(&[], Some("1")), (&[], end)])).await, (Vec::new(), false));
        }
    }

    #[tokio::test]
    async fn endless_empty_pages_are_an_error() {
        let server = Pages::of(&[(&[], Some("1"))]);
        let failure = page(&server, &Path::from("d"), None).await.unwrap_err();
        assert_eq!(failure.kind(), FailureKind::Unavailable, "{failure}");
        assert_eq!(server.requests.lock().len(), MAX_EMPTY_PAGES);
    }
}
