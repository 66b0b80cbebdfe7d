//! Tests of several modules, and of the layers below, with sessions.

mod connections;
mod export;
mod past;
mod segments;
