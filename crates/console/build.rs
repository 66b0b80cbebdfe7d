//! Lists the files of `web/dist` for the crate, which embeds them. The directory is empty until
//! `make console` has built the page.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

fn main() {
    // Always there, because it contains a file `.gitignore`.
    println!("cargo::rerun-if-changed=web/dist");
    println!("cargo::rerun-if-changed=build.rs");
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let entries = fs::read_dir(root.join("web/dist")).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    files.retain(|path| path.extension().is_some());
    files.sort();
    let mut list = String::from("&[\n");
    for path in files {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        writeln!(list, "    ({name:?}, include_bytes!({:?})),", path.display().to_string())
            .expect("strings accept everything");
    }
    list.push(']');
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    fs::write(out.join("files.rs"), list).expect("the build directory is writable");
}
