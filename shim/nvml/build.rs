//! Gives the library NVML's SONAME, so that `dlopen("libnvidia-ml.so.1")` finds the preloaded object.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo:rerun-if-changed=build.rs");
}
