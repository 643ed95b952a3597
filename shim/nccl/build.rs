//! Gives the library the name that training programs ask the loader for.
//!
//! The export list needs no script of its own: rustc already limits a cdylib to its `no_mangle` functions, which here are
//! the `nccl*` and `pnccl*` names only (a test reads them back from the built library).

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
}
