//! Which parameters of a kernel it writes through, as far as its C++ signature tells.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};

/// Signatures of kernels whose names are no mangled ones, by name.
static DECLARED: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());

/// The kernel called `name` has these types of parameters.
pub(crate) fn declare(name: &str, types: &[String]) {
    let signature = format!("{}({})", name.trim_start_matches(['&', ':']), types.join(", "));
    DECLARED.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), signature);
}

/// What a kernel may do with the device pointers inside one parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Nothing is written through it.
    Reads,
    /// Any of them may be written through.
    Writes,
    /// Only the first `n` are written through: operands of an element-wise kernel, outputs first.
    WritesFirst(u8),
    /// All but the first: a reduction, whose source comes first.
    WritesAllButFirst,
}

/// A C++ name as people write it; the name itself where it is none, or no C++ library is loaded.
pub(super) fn demangle(name: &str) -> String {
    type Demangle = unsafe extern "C" fn(*const c_char, *mut c_char, *mut usize, *mut c_int) -> *mut c_char;
    let Ok(mangled) = CString::new(name) else { return name.to_owned() };
    if !name.starts_with("_Z") {
        let declared = DECLARED.lock().unwrap_or_else(PoisonError::into_inner);
        return declared.get(name).map_or_else(|| name.to_owned(), String::clone);
    }
    // SAFETY: looks up a C++ library that is loaded, and a function in it or in the program.
    let address = unsafe {
        let library = libc::dlopen(c"libstdc++.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        let library = if library.is_null() { libc::RTLD_DEFAULT } else { library };
        libc::dlsym(library, c"__cxa_demangle".as_ptr())
    };
    if address.is_null() {
        return name.to_owned();
    }
    // SAFETY: the C++ ABI gives this function this type.
    let demangle = unsafe { std::mem::transmute::<*mut c_void, Demangle>(address) };
    let mut status = -1;
    // SAFETY: without a buffer the function allocates one with malloc.
    unsafe {
        let text = demangle(mangled.as_ptr(), std::ptr::null_mut(), std::ptr::null_mut(), &raw mut status);
        if text.is_null() {
            return name.to_owned();
        }
        let owned = CStr::from_ptr(text).to_string_lossy().into_owned();
        libc::free(text.cast());
        owned
    }
}

/// What the kernel with this demangled signature does with each of its `count` parameters.
pub(super) fn accesses(signature: &str, count: usize) -> Vec<Access> {
    let Some((name, types)) = split(signature).filter(|(_, types)| types.len() == count) else {
        return vec![Access::Writes; count];
    };
    let outputs = element_wise_outputs(name);
    let is_reduction = base(name).ends_with("::reduce_kernel") && count == 1;
    types
        .into_iter()
        .map(|text| match outputs {
            _ if reads_only(text) => Access::Reads,
            Some(outputs) if is_array_of_pointers(text) => Access::WritesFirst(outputs),
            _ if is_reduction => Access::WritesAllButFirst,
            _ => Access::Writes,
        })
        .collect()
}

/// A name for people: without return type and parameters, not too long.
pub(super) fn label(signature: &str) -> String {
    const MOST: usize = 160;
    let name = split(signature).map_or(signature, |(name, _)| name);
    let name = name.strip_prefix("void ").unwrap_or(name);
    match name.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &name[..end]),
        None => name.to_owned(),
    }
}

/// Name (with template arguments) and parameter types of a signature.
pub(super) fn split(signature: &str) -> Option<(&str, Vec<&str>)> {
    let inner = signature.strip_suffix(')')?;
    let mut depth = 1;
    let open = inner.char_indices().rev().find(|(_, letter)| {
        depth += match letter {
            ')' => 1,
            '(' => -1,
            _ => 0,
        };
        depth == 0
    })?;
    let (name, list) = (&inner[..open.0], &inner[open.0 + 1..]);
    let mut types = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (at, letter) in list.char_indices() {
        match letter {
            '<' | '(' | '[' | '{' => depth += 1,
            '>' | ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                types.push(list[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if !list.trim().is_empty() {
        types.push(list[start..].trim());
    }
    Some((name, types))
}

/// The template argument number `index` of a list, from the text after its opening bracket on.
pub(super) fn argument(text: &str, index: usize) -> Option<&str> {
    let (mut depth, mut start, mut number) = (0, 0, 0);
    for (at, letter) in text.char_indices() {
        match letter {
            '<' | '(' => depth += 1,
            ',' | '>' if depth == 0 => {
                if number == index {
                    return Some(text[start..at].trim());
                }
                if letter == '>' {
                    return None;
                }
                (number, start) = (number + 1, at + 1);
            }
            '>' | ')' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// The name without return type and template arguments.
pub(super) fn base(name: &str) -> &str {
    let name = name.strip_prefix("void ").unwrap_or(name);
    name.split('<').next().unwrap_or(name)
}

/// How many operands an element-wise kernel of ATen writes, if it is of the kind whose operands are one array.
fn element_wise_outputs(name: &str) -> Option<u8> {
    let kind = base(name).strip_prefix("at::native::")?;
    match kind {
        "vectorized_elementwise_kernel" | "unrolled_elementwise_kernel" => Some(1),
        "unrolled_elementwise_kernel_for_multi_outputs" => {
            let (_, arguments) = name.split_once('<')?;
            arguments.split([',', '>']).next()?.trim().parse().ok()
        }
        _ => None,
    }
}

fn is_array_of_pointers(text: &str) -> bool {
    ["std::array<char*", "at::detail::Array<char*"].iter().any(|start| text.starts_with(start))
}

/// Is it a number, a pointer to constants, or a view of constants?
fn reads_only(text: &str) -> bool {
    const NUMBERS: &[&str] = &[
        "bool",
        "char",
        "signed char",
        "unsigned char",
        "short",
        "unsigned short",
        "int",
        "unsigned int",
        "long",
        "unsigned long",
        "long long",
        "unsigned long long",
        "float",
        "double",
        "c10::Half",
        "c10::BFloat16",
    ];
    let text = text.strip_suffix("__restrict__").unwrap_or(text).trim_end();
    if NUMBERS.contains(&text) {
        return true;
    }
    if let Some(pointee) = text.strip_suffix('*') {
        return pointee.trim_end().ends_with("const");
    }
    if ["at::native::TrivialOffsetCalculator<", "OffsetCalculator<"].iter().any(|start| text.starts_with(start)) {
        return true;
    }
    let is_view = ["TensorInfo<", "PackedTensorAccessor<", "TensorAccessor<"].iter().any(|view| text.contains(view));
    let first = text.split_once('<').and_then(|(_, arguments)| arguments.split(',').next());
    is_view && first.is_some_and(|first| first.trim_end().ends_with("const"))
}

#[cfg(test)]
mod tests {
    use super::Access::{Reads, Writes, WritesAllButFirst, WritesFirst};
    use super::*;

    #[test]
    fn pointers_to_constants_are_read() {
        let signature = "void at::native::f<float, {lambda(int)#1}>(float const*, long*, float const* __restrict__, int, \
                         at::GenericPackedTensorAccessor<long const, 2ul, at::RestrictPtrTraits, int>)";
        assert_eq!(accesses(signature, 5), [Reads, Writes, Reads, Reads, Reads]);
        assert_eq!(accesses(signature, 4), [Writes; 4], "another number of parameters: nothing is known");
        assert_eq!(accesses("triton_kernel", 2), [Writes; 2]);
        assert_eq!(accesses("f()", 0), []);
    }

    #[test]
    fn operands_of_element_wise_kernels() {
        let plain = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, std::array<char*, 3ul>\
                     >(int, at::native::AddFunctor<float>, std::array<char*, 3ul>)";
        assert_eq!(accesses(plain, 3), [Reads, Writes, WritesFirst(1)]);
        let several = "void at::native::unrolled_elementwise_kernel_for_multi_outputs<2, F<(int)1>, std::array<char*, 4ul>\
                       >(int, F<(int)1>, std::array<char*, 4ul>)";
        assert_eq!(accesses(several, 3), [Reads, Writes, WritesFirst(2)]);
        let legacy = "void at::native::elementwise_kernel<128, 4, f(x)::{lambda(int)#1}>(int, f(x)::{lambda(int)#1})";
        assert_eq!(accesses(legacy, 2), [Reads, Writes]);
    }

    #[test]
    fn a_reduction_reads_its_first_pointer() {
        let text = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(at::native::ReduceOp<float>)";
        assert_eq!(accesses(text, 1), [WritesAllButFirst]);
    }
}
