//! The web page of the console, embedded in the program.
//!
//! `make console` builds it from `web/` (TypeScript, bundled by esbuild) into `web/dist`, which the
//! build script lists. Without it the page states how to build it, so that the program can be built
//! without Node.js.

/// The name of the page.
const INDEX: &str = "index.html";

/// The built files: name and content.
static FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/files.rs"));

/// The page if the files were not built.
static NOT_BUILT: &[u8] = include_bytes!("not_built.html");

/// The policy for all responses: scripts, styles and connections only of the same origin, no frames
/// and no plugins.
pub const CONTENT_SECURITY_POLICY: &str =
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A file of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asset {
    /// The value of the header `Content-Type`.
    pub content_type: &'static str,
    /// The content.
    pub body: &'static [u8],
}

/// Returns true if the page was built.
pub fn is_built() -> bool {
    FILES.iter().any(|(name, _)| *name == INDEX)
}

/// The page.
pub fn index() -> Asset {
    asset(INDEX).unwrap_or(Asset { content_type: content_type(INDEX), body: NOT_BUILT })
}

/// The file with this name.
pub fn asset(name: &str) -> Option<Asset> {
    let (name, body) = FILES.iter().find(|(file, _)| *file == name)?;
    Some(Asset { content_type: content_type(name), body })
}

fn content_type(name: &str) -> &'static str {
    match name.rsplit_once('.').map(|(_, extension)| extension) {
        Some("html") => "text/html; charset=utf-8",
        Some("js") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_is_served_whether_it_was_built_or_not() {
        let page = std::str::from_utf8(index().body).unwrap();
        assert!(page.starts_with("<!doctype html>"), "{page}");
        assert_eq!(page.contains("make console"), !is_built(), "{page}");
        assert_eq!(index().content_type, "text/html; charset=utf-8");
    }

    #[test]
    fn built_files_have_a_content_type_and_no_inline_code() {
        for (name, body) in FILES {
            assert_ne!(content_type(name), "application/octet-stream", "{name}");
            if let Some(page) = std::str::from_utf8(body).ok().filter(|_| *name == INDEX) {
                assert!(!page.contains("<style") && !page.contains(" style="), "the policy blocks it");
                assert!(page.matches("<script").count() == page.matches("<script src=").count());
            }
        }
    }

    #[test]
    fn other_names_are_no_files() {
        for name in ["", "..", "../src/lib.rs", "index", ".gitignore"] {
            assert_eq!(asset(name), None, "{name}");
        }
    }
}
