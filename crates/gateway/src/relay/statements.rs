//! The prepared statements of a front's client, which are prepared again when its session continues
//! at another node.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::control::Control;
use super::unit::{Change, HEADER_BYTES, Unit, split_name, text_of};

/// Maximum size of the prepared statements, with the units that prepare them again. Statements
/// beyond it are lost when the session continues at another node.
const MAX_BYTES: usize = 4 << 20;

/// The prepared statements.
#[derive(Default)]
pub(super) struct Statements {
    /// Parse messages by the names of the statements.
    messages: BTreeMap<Box<[u8]>, Rc<[u8]>>,
    bytes: usize,
}

impl Statements {
    /// The size of the statements.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The Parse messages.
    pub(super) fn messages(&self) -> impl DoubleEndedIterator<Item = &[u8]> {
        self.messages.values().map(|message| &**message)
    }

    /// What a statement does. `None` if it is not known.
    pub(super) fn control_of(&self, name: &[u8]) -> Option<Control> {
        let message = self.messages.get(name)?;
        text_of(message, name).map(Control::of_statement)
    }

    /// Applies the changes of a unit.
    pub(super) fn apply(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Parse(message) => {
                    let Some(name) = message.get(HEADER_BYTES..).and_then(split_name) else { continue };
                    self.forget(name);
                    let size_bytes = size_bytes(name, &message);
                    if self.bytes + size_bytes <= MAX_BYTES {
                        self.bytes += size_bytes;
                        self.messages.insert(name.into(), message);
                    }
                }
                Change::Close(name) => self.forget(&name),
                Change::CloseAll => {
                    self.messages.clear();
                    self.bytes = 0;
                }
                Change::Portal => {}
            }
        }
    }

    /// Removes a statement.
    pub(super) fn forget(&mut self, name: &[u8]) {
        if let Some(message) = self.messages.remove(name) {
            self.bytes -= size_bytes(name, &message);
        }
    }
}

/// The size of a statement.
fn size_bytes(name: &[u8], message: &[u8]) -> usize {
    message.len() + name.len() + Unit::OVERHEAD_BYTES
}
