//! The one list of what libcudart and libcuda functions the emulated device has, and how far they go.

use crate::export::{Export, Support};
use crate::{driver, runtime};
use std::ffi::{CString, c_char};
use std::sync::OnceLock;

/// Tables of the runtime's functions.
const RUNTIME: &[&[Export]] = &[
    runtime::device::FUNCTIONS,
    runtime::device::REFUSED,
    runtime::error::FUNCTIONS,
    runtime::error::PLAIN,
    runtime::event::FUNCTIONS,
    runtime::graph::FUNCTIONS,
    runtime::graph::REFUSED,
    runtime::launch::FUNCTIONS,
    runtime::launch::PLAIN,
    runtime::launch::REFUSED,
    runtime::memory::FUNCTIONS,
    runtime::memory::REFUSED,
    runtime::pool::FUNCTIONS,
    runtime::pool::REFUSED,
    runtime::stream::FUNCTIONS,
];

/// The list as text, one function a line: `library<TAB>name<TAB>served|refused`, sorted. For documentation and tests.
#[unsafe(no_mangle)]
pub extern "C" fn prism_cuda_functions() -> *const c_char {
    static TEXT: OnceLock<CString> = OnceLock::new();
    TEXT.get_or_init(|| CString::new(list()).unwrap_or_default()).as_ptr()
}

fn list() -> String {
    let mut lines = Vec::new();
    for (library, tables) in [("libcudart", RUNTIME), ("libcuda", driver::TABLES)] {
        for export in tables.iter().flat_map(|table| table.iter()) {
            let support = match export.support {
                Support::Served => "served",
                Support::Refused => "refused",
            };
            lines.push(format!("{library}\t{}\t{support}\n", export.name));
        }
    }
    lines.sort();
    lines.concat()
}

#[cfg(test)]
mod tests {
    #[test]
    fn no_function_is_listed_twice() {
        let list = super::list();
        let mut names: Vec<_> = list.lines().filter_map(|line| line.split('\t').nth(1)).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(count > 250);
    }
}
