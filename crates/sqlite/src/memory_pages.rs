//! Pages in memory, without transactions, for tests: SQLite rolls back with its journal, as in a
//! plain file.

use std::cell::RefCell;
use std::rc::Rc;

use fulmar_pages::{PAGE_SIZE, Page, PageNo};

use crate::link::Link;
use crate::pages::{Pages, Refusal, TransactionOutcome};
use crate::{Error, Result};

/// The pages of one database, shared by its connections. Pages are never freed, since SQLite may
/// hold pointers to them.
#[derive(Clone, Default)]
pub(crate) struct MemoryPages(Rc<RefCell<Vec<*mut Page>>>);

/// A page, and what SQLite may read after it ([`Pages::fetch`]).
#[repr(C)]
struct PaddedPage {
    page: Page,
    _after: [u8; 256],
}

impl MemoryPages {
    fn get(&self, page: PageNo) -> Option<*mut Page> {
        self.0.borrow().get(page as usize - 1).copied()
    }
}

impl Pages for MemoryPages {
    fn begin(&self) {}

    fn reserve(&self) -> std::result::Result<(), Refusal> {
        Ok(())
    }

    fn commit(&self, _link: &Link) -> std::result::Result<(), Refusal> {
        Ok(())
    }

    fn end(&self, _link: &Link) {}

    fn page_count(&self) -> u32 {
        self.0.borrow().len() as u32
    }

    fn read(
        &self,
        _link: &Link,
        page: PageNo,
        within: usize,
        out: &mut [u8],
    ) -> std::result::Result<bool, Refusal> {
        let Some(page) = self.get(page) else { return Ok(false) };
        // SAFETY: pages are never freed, and tests use one thread.
        out.copy_from_slice(unsafe { &(&(*page))[within..within + out.len()] });
        Ok(true)
    }

    fn fetch(&self, _link: &Link, page: PageNo) -> std::result::Result<Option<&Page>, Refusal> {
        // SAFETY: as above.
        Ok(self.get(page).map(|page| unsafe { &*page }))
    }

    fn unfetch(&self, _page: *const Page) {}

    fn write(&self, _link: &Link, page: PageNo, data: &Page) -> std::result::Result<(), Refusal> {
        let padded = || PaddedPage { page: [0; PAGE_SIZE], _after: [0; 256] };
        let new = || Box::into_raw(Box::new(padded())).cast::<Page>();
        let missing = (page as usize).saturating_sub(self.0.borrow().len());
        self.0.borrow_mut().extend(std::iter::repeat_with(new).take(missing));
        if let Some(page) = self.get(page) {
            // SAFETY: as above.
            unsafe { *page = *data };
        }
        Ok(())
    }

    fn truncate(&self, page_count: u32) {
        self.0.borrow_mut().truncate(page_count as usize);
    }

    fn step_aside(&self) {}

    fn changed_bytes(&self) -> u64 {
        0
    }

    fn is_expired(&self) -> bool {
        false
    }

    fn failure(&self) -> Option<Error> {
        None
    }

    fn has_conflicted(&self) -> bool {
        false
    }

    fn has_committed(&self) -> bool {
        false
    }

    fn take_wrote(&self) -> bool {
        false
    }

    fn admit_files(&self) -> Result<()> {
        Ok(())
    }

    fn check_writable(&self) -> Result<()> {
        Ok(())
    }

    fn new_transaction_id(&self) -> u64 {
        1
    }

    fn set_transaction_id(&self, _id: u64) {}

    fn outcome(
        &self,
        _link: &Link,
        _id: u64,
        _decides: bool,
    ) -> std::result::Result<TransactionOutcome, Refusal> {
        Ok(TransactionOutcome::Forgotten)
    }
}
