//! A page of names that an S3 server lists.
//!
//! ```text
//!   start-after the last name -> 1,000 names, token     the caller comes back with the last of them
//!                             -> no names,    token     it is followed, here
//!                             -> names or none          the end
//! ```
//!
//! Above this a page is continued by its last name ([`super::Listing`]): so a listing can be tried again from where it was, and a
//! store need not remember anything. A page without a name has no last one. Servers answer such pages, with a token for
//! the next, where a stretch of names is deleted ones that they still hold (versions, markers); only the token leads on.
//! It must not be taken for the end: what collects would take what is listed behind it for garbage, and who looks for the newest
//! manifest would find an older one.
//!
//! A token that is empty is none: some servers write the element in any case, and the library reads it so too.

use object_store::ObjectMeta;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;

use super::backend::{no_bucket, s3_failure};
use super::{Failure, FailureKind};

/// Pages without names, one behind the other, before a server is held to go round in a circle. (The time that a try may take
/// is over sooner, most likely.)
const MOST_EMPTY_PAGES: usize = 1000;

/// Objects below a directory, from the first one after `after` on, and whether there may be more: at least one object if so.
pub(super) async fn page(
    server: &dyn PaginatedListStore,
    directory: &Path,
    after: Option<&Path>,
) -> Result<(Vec<ObjectMeta>, bool), Failure> {
    let prefix = format!("{directory}/");
    let mut page_token = None;
    for _ in 0..MOST_EMPTY_PAGES {
        let offset = after.map(ToString::to_string);
        let options = PaginatedListOptions { offset, page_token, ..PaginatedListOptions::default() };
        let page = server.list_paginated(Some(&prefix), options).await;
        let page = page.map_err(|cause| no_bucket(s3_failure(&cause)))?;
        page_token = page.page_token.filter(|token| !token.is_empty());
        if page_token.is_none() || !page.result.objects.is_empty() {
            return Ok((page.result.objects, page_token.is_some()));
        }
    }
    let cause = format!("{MOST_EMPTY_PAGES} pages of a listing have no names, and each promises more");
    Err(Failure::new(FailureKind::Unavailable, cause))
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use object_store::ListResult;
    use object_store::list::PaginatedListResult;
    use parking_lot::Mutex;

    use super::*;

    /// A server whose pages are these: names, and the token for the next one.
    struct Pages {
        pages: Vec<(Vec<&'static str>, Option<&'static str>)>,
        /// The token, and the name to start after, of each request.
        asked: Mutex<Vec<(Option<String>, Option<String>)>>,
    }

    impl Pages {
        fn of(pages: &[(&[&'static str], Option<&'static str>)]) -> Pages {
            let pages = pages.iter().map(|(names, token)| (names.to_vec(), *token)).collect();
            Pages { pages, asked: Mutex::default() }
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
            let mut asked = self.asked.lock();
            let (names, token) = &self.pages[asked.len() % self.pages.len()];
            asked.push((options.page_token, options.offset));
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
    async fn an_empty_page_that_promises_more_is_not_the_end() {
        let server = Pages::of(&[(&[], Some("1")), (&[], Some("2")), (&["d/a"], Some("3"))]);
        assert_eq!(of(&server).await, (vec!["d/a".to_owned()], true));
        let start = Some("d/0".to_owned());
        let asked = [None, Some("1"), Some("2")].map(|token| (token.map(str::to_owned), start.clone()));
        assert_eq!(*server.asked.lock(), asked);
    }

    #[tokio::test]
    async fn the_end_is_a_page_without_a_token() {
        for end in [None, Some("")] {
            assert_eq!(of(&Pages::of(&[(&[], end)])).await, (Vec::new(), false));
            assert_eq!(of(&Pages::of(&[(&["d/a"], end)])).await, (vec!["d/a".to_owned()], false));
            assert_eq!(of(&Pages::of(&[(&[], Some("1")), (&[], end)])).await, (Vec::new(), false));
        }
    }

    #[tokio::test]
    async fn a_circle_is_an_error() {
        let server = Pages::of(&[(&[], Some("1"))]);
        let failure = page(&server, &Path::from("d"), None).await.unwrap_err();
        assert_eq!(failure.kind(), FailureKind::Unavailable, "{failure}");
        assert_eq!(server.asked.lock().len(), MOST_EMPTY_PAGES);
    }
}
