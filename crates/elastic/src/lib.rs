//! What the controller of a cluster needs besides [`fulmar_control`]: its settings, and the
//! provisioners that add and remove nodes.
//!
//! - [`settings`]: the settings of the controller, by name, as `fulmar control set` changes them.
//! - [`provisioner`]: starts and stops nodes: processes on this machine, or by an operator's program.
//!
//! The loop that uses them is in the crate `fulmar-node`.

#![forbid(unsafe_code)]

pub mod provisioner;
pub mod settings;
