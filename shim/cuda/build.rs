//! Gives the library the driver's SONAME, so that `dlopen("libcuda.so.1")` finds the preloaded object.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rerun-if-changed=build.rs");
}
