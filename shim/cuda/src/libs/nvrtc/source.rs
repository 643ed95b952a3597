//! What CUDA C++ source says of its kernels: names, types of parameters, and where they lie.
//!
//! There is no C++ front end here. Parameters are placed where they are numbers, pointers, or structs of such that the source
//! or its headers define, by the rules of the Itanium C++ ABI (natural alignment, bases first). A kernel with any other
//! parameter is left without: its launch then counts as writing anything, and a remark names it.

use crate::values::Parameter;

/// A kernel that source defines or declares.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Kernel {
    /// Its name without namespaces.
    pub(super) name: String,
    /// Types of its parameters, as a demangler writes them (`float const*`).
    pub(super) types: Vec<String>,
    /// Where its parameters lie, if that could be found out.
    pub(super) parameters: Option<Vec<Parameter>>,
}

/// Size and alignment in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    bytes: u32,
    alignment: u32,
    /// Bytes without padding at the end.
    data: u32,
}

const fn scalar(bytes: u32) -> Layout {
    Layout { bytes, alignment: bytes, data: bytes }
}

/// Number types (of CUDA on 64-bit Linux) with their bytes.
const NUMBERS: [(&str, u32); 29] = [
    ("bool", 1),
    ("char", 1),
    ("signed char", 1),
    ("unsigned char", 1),
    ("int8_t", 1),
    ("uint8_t", 1),
    ("short", 2),
    ("unsigned short", 2),
    ("int16_t", 2),
    ("uint16_t", 2),
    ("int", 4),
    ("signed", 4),
    ("unsigned", 4),
    ("unsigned int", 4),
    ("int32_t", 4),
    ("uint32_t", 4),
    ("float", 4),
    ("long", 8),
    ("unsigned long", 8),
    ("long int", 8),
    ("unsigned long int", 8),
    ("long long", 8),
    ("unsigned long long", 8),
    ("int64_t", 8),
    ("uint64_t", 8),
    ("size_t", 8),
    ("ptrdiff_t", 8),
    ("uintptr_t", 8),
    ("double", 8),
];

/// Words around a type that do not change where it lies.
const QUALIFIERS: [&str; 9] = [
    "const",
    "volatile",
    "__restrict__",
    "__restrict",
    "__grid_constant__",
    "typename",
    "struct",
    "constexpr",
    "mutable",
];

/// How many structs and other names may stand for each other.
const MOST_NAMES: u32 = 16;

/// Source with its headers, without comments.
pub(super) struct Source {
    texts: Vec<String>,
}

fn is_word(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// A text without comments.
fn without_comments(text: &str) -> String {
    let (mut rest, mut result) = (text, String::with_capacity(text.len()));
    while let Some(at) = rest.find('/') {
        result.push_str(&rest[..at]);
        let comment = &rest[at..];
        let end = match comment.as_bytes().get(1) {
            Some(b'/') => comment.find('\n').unwrap_or(comment.len()),
            Some(b'*') => comment.get(2..).and_then(|inner| inner.find("*/")).map_or(comment.len(), |end| end + 4),
            _ => {
                result.push('/');
                1
            }
        };
        if end > 1 {
            result.push(' ');
        }
        rest = &comment[end..];
    }
    result.push_str(rest);
    result
}

/// What stands in the bracket that `text` starts with, and what follows it.
fn bracket(text: &str) -> Option<(&str, &str)> {
    let mut depth = 0_usize;
    for (at, letter) in text.char_indices() {
        match letter {
            '(' | '{' | '[' => depth += 1,
            ')' | '}' | ']' => depth = depth.checked_sub(1)?,
            _ => {}
        }
        if depth == 0 {
            return Some((&text[1..at], &text[at + 1..]));
        }
    }
    None
}

/// The parts of a list between commas that stand in no bracket.
fn parts(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut found) = (0_i32, 0, Vec::new());
    for (at, letter) in list.char_indices() {
        match letter {
            '(' | '{' | '[' | '<' => depth += 1,
            ')' | '}' | ']' | '>' => depth -= 1,
            ',' if depth == 0 => {
                found.push(list[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if !list[start..].trim().is_empty() {
        found.push(list[start..].trim());
    }
    found
}

/// A declared variable: the words of its type, its pointers, and how many there are of it.
struct Variable<'a> {
    words: Vec<&'a str>,
    is_pointer: bool,
    is_constant: bool,
    count: u32,
}

impl<'a> Variable<'a> {
    /// Of `const float* __restrict__ const name[4] = {}`; a parameter may have no name.
    fn read(text: &'a str, is_named: bool) -> Option<Self> {
        let text = text.split('=').next()?.trim();
        let (text, count) = match text.split_once('[') {
            Some((before, count)) => (before, count.strip_suffix(']')?.trim().parse().ok()?),
            None => (text, 1),
        };
        let text = text.split('{').next()?;
        // References, templates, functions and bit fields.
        if text.contains(['(', '&', '<']) || text.replace("::", "").contains(':') {
            return None;
        }
        let is_pointer = text.contains('*');
        let pointee = text.split('*').next()?;
        let is_constant = is_pointer && pointee.split_whitespace().any(|word| word == "const");
        let mut words: Vec<_> = pointee.split_whitespace().filter(|word| !QUALIFIERS.contains(word)).collect();
        let is_number = |words: &[&str]| NUMBERS.iter().any(|(name, _)| *name == words.join(" "));
        // The name stands last, where no star comes before it.
        if !is_pointer && (is_named || words.len() > 1 && !is_number(&words)) {
            words.pop()?;
        }
        (!words.is_empty()).then_some(Self { words, is_pointer, is_constant, count })
    }

    fn type_text(&self) -> String {
        let constant = if self.is_constant { " const" } else { "" };
        let star = if self.is_pointer { "*" } else { "" };
        format!("{}{constant}{star}", self.words.join(" "))
    }
}

impl Source {
    pub(super) fn new<'a>(texts: impl Iterator<Item = &'a str>) -> Self {
        Self { texts: texts.map(without_comments).collect() }
    }

    /// The kernels of the program itself, in order; of a name that is declared in two ways nothing more is known.
    pub(super) fn kernels(&self) -> Vec<Kernel> {
        let mut found: Vec<Kernel> = Vec::new();
        for kernel in
            self.texts.iter().flat_map(|text| text.split("__global__").skip(1)).filter_map(|rest| self.kernel(rest))
        {
            match found.iter_mut().find(|known| known.name == kernel.name) {
                Some(known) if known.parameters != kernel.parameters => known.parameters = None,
                Some(_) => {}
                None => found.push(kernel),
            }
        }
        found
    }

    /// The kernel whose declaration goes on with `rest` after `__global__`.
    fn kernel(&self, rest: &str) -> Option<Kernel> {
        // Its name is the first word before a parenthesis that is no annotation.
        let mut from = 0;
        loop {
            let at = from + rest[from..].find('(')?;
            let before = rest[..at].trim_end();
            if before[from.min(before.len())..].contains(['{', ';', '}']) {
                return None;
            }
            let name = &before[before.trim_end_matches(is_word).len()..];
            let (list, after) = bracket(&rest[at..])?;
            if !name.is_empty() && !matches!(name, "__launch_bounds__" | "__attribute__" | "__cluster_dims__") {
                let list = if list.trim() == "void" { "" } else { list };
                let variables: Option<Vec<_>> =
                    parts(list).into_iter().map(|text| Variable::read(text, false)).collect();
                let types = variables.iter().flatten().map(Variable::type_text).collect();
                let parameters = variables.and_then(|variables| self.place(&variables));
                return Some(Kernel { name: name.to_owned(), types, parameters });
            }
            from = rest.len() - after.len();
        }
    }

    fn place(&self, variables: &[Variable]) -> Option<Vec<Parameter>> {
        let mut end = 0_u32;
        let place = |variable: &Variable| {
            // An array is passed by its address.
            let layout = if variable.count == 1 { self.layout_of(variable, 0)? } else { return None };
            let offset = end.checked_next_multiple_of(layout.alignment)?;
            end = offset.checked_add(layout.bytes)?;
            Some(Parameter { offset, bytes: layout.bytes })
        };
        variables.iter().map(place).collect()
    }

    fn layout_of(&self, variable: &Variable, depth: u32) -> Option<Layout> {
        let one = if variable.is_pointer { scalar(8) } else { self.layout(&variable.words.join(" "), depth)? };
        let bytes = one.bytes.checked_mul(variable.count)?;
        Some(Layout { bytes, data: bytes, ..one })
    }

    /// The layout of a type that is no pointer.
    fn layout(&self, name: &str, depth: u32) -> Option<Layout> {
        let plain = name.rsplit("::").next()?;
        if depth > MOST_NAMES {
            return None;
        }
        if let Some((_, bytes)) = NUMBERS.iter().find(|(known, _)| *known == plain) {
            return Some(scalar(*bytes));
        }
        let mut found = None;
        for text in &self.texts {
            for layout in self.defined(text, plain, depth) {
                // Two definitions that differ: which one holds is not known.
                if found.is_some_and(|known| Some(known) != layout) {
                    return None;
                }
                found = Some(layout?);
            }
        }
        found
    }

    /// What `text` defines `name` to be, each time it does.
    fn defined(&self, text: &str, name: &str, depth: u32) -> Vec<Option<Layout>> {
        let mut found = Vec::new();
        for (at, _) in text.match_indices(name) {
            let (before, after) = (text[..at].trim_end(), &text[at + name.len()..]);
            if text[..at].ends_with(is_word) || after.starts_with(is_word) {
                continue;
            }
            let after = after.trim_start();
            if before.ends_with("struct") && after.starts_with([':', '{']) {
                // A template's layout depends on its arguments.
                let is_template = before.trim_end_matches("struct").trim_end().ends_with('>');
                found.push(if is_template { None } else { self.record(after, depth + 1) });
            } else if before.ends_with("using")
                && let Some(other) = after.strip_prefix('=')
            {
                let other = other.split(';').next().and_then(|text| Variable::read(text, false));
                found.push(other.and_then(|variable| self.layout_of(&variable, depth + 1)));
            }
        }
        found
    }

    /// The layout of a struct from the text after its name on.
    fn record(&self, text: &str, depth: u32) -> Option<Layout> {
        let open = text.find('{')?;
        let bases = text[..open].trim().trim_start_matches(':');
        let (body, _) = bracket(&text[open..])?;
        if body.contains(['#']) || body.contains("virtual") || bases.contains("virtual") {
            return None;
        }
        let mut record = Layout { bytes: 0, alignment: 1, data: 0 };
        // Of a base whose end is padding, the next member's place depends on what kind of class it is.
        let mut loose = None;
        for base in parts(bases) {
            let layout = self.layout(base.split_whitespace().last()?, depth)?;
            loose = (layout.bytes != layout.data).then_some(layout.data);
            record.add(layout)?;
        }
        let mut rest = body.trim();
        while !rest.is_empty() {
            let (member, next) = statement(rest)?;
            rest = next.trim();
            let Some(member) = member else { continue };
            let declarators = parts(member);
            let (first, others) = declarators.split_first()?;
            let first = Variable::read(first, true)?;
            if !others.is_empty() && (first.is_pointer || others.iter().any(|other| other.contains(['*', '[']))) {
                return None;
            }
            let layout = self.layout_of(&first, depth)?;
            if let Some(data) = loose.take()
                && data.checked_next_multiple_of(layout.alignment)?
                    != record.data.checked_next_multiple_of(layout.alignment)?
            {
                return None;
            }
            for _ in &declarators {
                record.add(layout)?;
            }
        }
        record.bytes = record.data.checked_next_multiple_of(record.alignment)?.max(1);
        Some(record)
    }
}

impl Layout {
    /// Adds a member behind the others.
    fn add(&mut self, member: Self) -> Option<()> {
        let offset = self.data.checked_next_multiple_of(member.alignment)?;
        self.data = offset.checked_add(member.bytes)?;
        self.alignment = self.alignment.max(member.alignment);
        Some(())
    }
}

/// The first statement of a struct's body, `None` inside if it is no member with a place, and what follows. Functions are
/// no members; of what else is known (nested types, bit fields) there is no layout.
fn statement(body: &str) -> Option<(Option<&str>, &str)> {
    for label in ["public:", "private:", "protected:"] {
        if let Some(rest) = body.strip_prefix(label) {
            return Some((None, rest));
        }
    }
    let end = body.find([';', '('])?;
    let declaration = &body[..end];
    let word = declaration.split(|letter| !is_word(letter)).next()?;
    if matches!(word, "struct" | "union" | "class" | "enum" | "alignas" | "template" | "__align__") {
        return None;
    }
    if body[end..].starts_with('(') {
        // A function: to the end of its parameters, then of its body or declaration.
        let (_, after) = bracket(&body[end..])?;
        let stop = after.find([';', '{'])?;
        let rest = if after[stop..].starts_with('{') { bracket(&after[stop..])?.1 } else { &after[stop + 1..] };
        return Some((None, rest));
    }
    let is_member = !matches!(word, "static" | "using" | "typedef" | "friend" | "");
    Some((is_member.then_some(declaration), &body[end + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = r"
        /* struct Params { int wrong; }; */
        struct Base {
          int rows = 0, cols = 0;   // struct Params { };
          void* x = nullptr;
          bool flag = false;
        };
        struct Params : public Base {
          Params() : z(nullptr) { }
          static constexpr int N = 4;
          bool is_last() const { return flag; }
          const float *z;
          float epsilon = 0.f;
          unsigned char kinds[3];
        };
        using Other = Params;
        struct Nested { Params params; short more; };
        struct Tail : Base { bool behind; };
        template <typename T> struct Of { T value; };
    ";

    fn places(declaration: &str) -> Option<Vec<(u32, u32)>> {
        let kernel = Source::new([declaration, HEADER].into_iter()).kernels().into_iter().next()?;
        Some(kernel.parameters?.iter().map(|parameter| (parameter.offset, parameter.bytes)).collect())
    }

    #[test]
    fn kernels_are_found_behind_annotations() {
        let source = r#"
            __device__ float f(float x) { return x; }
            extern "C" __global__ void first(float *p) { p[0] = f(1); }
            template <typename T> __global__ void __launch_bounds__(256, f(2)) second (T *p);
            // __global__ without a kernel;
            __global__ int; int other() { return 1; }
            __global__ __launch_bounds__(64) void third(void) { }
        "#;
        let names: Vec<_> = Source::new([source].into_iter()).kernels().into_iter().map(|kernel| kernel.name).collect();
        assert_eq!(names, ["first", "second", "third"]);
    }

    #[test]
    fn parameters_lie_as_a_compiler_puts_them() {
        let list =
            "__global__ void k(const T* __restrict__ const in, bool, unsigned int n, T *const out, const size_t rows)";
        assert_eq!(places(list).expect("placed"), [(0, 8), (8, 1), (12, 4), (16, 8), (24, 8)]);
        // Base: 4 + 4 + 8 + 1, padded to 24; then 8, 4 and 3 bytes, padded to 40.
        assert_eq!(
            places("__global__ void k(int n, ns::Params p, char c);").expect("placed"),
            [(0, 4), (8, 40), (48, 1)]
        );
        assert_eq!(places("__global__ void k(const Other p) {}").expect("placed"), [(0, 40)]);
        assert_eq!(places("__global__ void k(Nested p) {}").expect("placed"), [(0, 48)]);
        assert_eq!(places("__global__ void k() {}").expect("placed"), []);
    }

    #[test]
    fn what_is_not_known_is_left_without() {
        for list in ["T value", "Of<int> value", "int (*f)(int)", "Tail tail", "Missing m", "int a[3]"] {
            assert_eq!(places(&format!("__global__ void k({list});")), None, "{list}");
        }
        let twice = Source::new(["__global__ void k(int); __global__ void k(double);"].into_iter()).kernels();
        assert_eq!(twice.len(), 1);
        assert_eq!(twice[0].parameters, None);
        let circle =
            Source::new(["__global__ void k(A a); struct A { B b; }; struct B { A a; };"].into_iter()).kernels();
        assert_eq!(circle[0].parameters, None);
    }

    #[test]
    fn types_are_written_as_a_demangler_does() {
        let kernels =
            Source::new(["__global__ void k(const float* __restrict__ const a, T* b, const int c)"].into_iter())
                .kernels();
        assert_eq!(kernels[0].types, ["float const*", "T*", "int"]);
    }

    #[test]
    fn any_text_is_source() {
        for text in [
            "__global__",
            "__global__ (",
            "__global__ void k(",
            "/*",
            "/",
            "//",
            "__global__ void k(é* a)",
            "struct A {",
        ] {
            let kernels = Source::new([text, "__global__ void k(A a)"].into_iter()).kernels();
            assert!(kernels.len() <= 1, "{text}");
        }
    }
}
