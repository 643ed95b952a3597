//! Where the Python program is, for messages, and what belongs to the interpreter. The interpreter is found at run time: the
//! library does not link to it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::Range;
use std::rc::Rc;
use std::sync::OnceLock;

type Object = *mut c_void;

/// The functions of the interpreter that are needed, if there is one in the process.
struct Interpreter {
    is_initialized: unsafe extern "C" fn() -> c_int,
    this_thread_state: unsafe extern "C" fn() -> *mut c_void,
    ensure: unsafe extern "C" fn() -> c_int,
    release: unsafe extern "C" fn(c_int),
    frame: unsafe extern "C" fn() -> Object,
    back: unsafe extern "C" fn(Object) -> Object,
    code: unsafe extern "C" fn(Object) -> Object,
    line: unsafe extern "C" fn(Object) -> c_int,
    /// The place in the code; since Python 3.11.
    offset: Option<unsafe extern "C" fn(Object) -> c_int>,
    attribute: unsafe extern "C" fn(Object, *const c_char) -> Object,
    text: unsafe extern "C" fn(Object) -> *const c_char,
    incref: unsafe extern "C" fn(Object),
    decref: unsafe extern "C" fn(Object),
}

fn symbol(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the name is a C string.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

unsafe extern "C" {
    /// As `dladdr`, with the symbol table's entry (glibc).
    fn dladdr1(
        address: *const c_void,
        info: *mut libc::Dl_info,
        extra: *mut *const libc::Elf64_Sym,
        what: c_int,
    ) -> c_int;
}

/// `RTLD_DL_SYMENT`: `extra` of [`dladdr1`] is the symbol's entry.
const SYMBOL_ENTRY: c_int = 1;

/// Where the interpreter keeps its state, with the interpreter lock in it; empty without an interpreter.
fn interpreter_state() -> Range<usize> {
    let Some(start) = symbol(c"_PyRuntime") else { return 0..0 };
    // SAFETY: zeros are a value of this struct of pointers.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let mut entry: *const libc::Elf64_Sym = std::ptr::null();
    // SAFETY: both results live on this stack frame; the entry, if any, lies in the interpreter's symbol table.
    let size = unsafe {
        match dladdr1(start, &raw mut info, &raw mut entry, SYMBOL_ENTRY) {
            0 => 0,
            _ => entry.as_ref().map_or(0, |entry| entry.st_size as usize),
        }
    };
    start as usize..start as usize + size
}

/// Does an address belong to the interpreter's own state? Of condition variables only those of its lock do.
pub(crate) fn is_of_interpreter(address: usize) -> bool {
    static STATE: OnceLock<Range<usize>> = OnceLock::new();
    STATE.get_or_init(interpreter_state).contains(&address)
}

/// Is the interpreter being torn down?
pub(crate) fn is_finalizing() -> bool {
    static ASK: OnceLock<Option<unsafe extern "C" fn() -> c_int>> = OnceLock::new();
    let ask = ASK.get_or_init(|| {
        let address = symbol(c"Py_IsFinalizing").or_else(|| symbol(c"_Py_IsFinalizing"))?;
        // SAFETY: both names are functions of this type.
        Some(unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(address) })
    });
    // SAFETY: may be called at any time.
    ask.is_some_and(|ask| unsafe { ask() } != 0)
}

/// A symbol as a function of the given type.
macro_rules! function {
    ($name:literal, ($($argument:ty),*) $(-> $result:ty)?) => {
        // SAFETY: the interpreter documents this function with this type.
        unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(symbol($name)?)
        }
    };
}

impl Interpreter {
    fn offset() -> Option<unsafe extern "C" fn(Object) -> c_int> {
        Some(function!(c"PyFrame_GetLasti", (Object) -> c_int))
    }

    fn find() -> Option<Self> {
        Some(Self {
            is_initialized: function!(c"Py_IsInitialized", () -> c_int),
            this_thread_state: function!(c"PyGILState_GetThisThreadState", () -> *mut c_void),
            ensure: function!(c"PyGILState_Ensure", () -> c_int),
            release: function!(c"PyGILState_Release", (c_int)),
            frame: function!(c"PyEval_GetFrame", () -> Object),
            back: function!(c"PyFrame_GetBack", (Object) -> Object),
            code: function!(c"PyFrame_GetCode", (Object) -> Object),
            line: function!(c"PyFrame_GetLineNumber", (Object) -> c_int),
            offset: Self::offset(),
            attribute: function!(c"PyObject_GetAttrString", (Object, *const c_char) -> Object),
            text: function!(c"PyUnicode_AsUTF8", (Object) -> *const c_char),
            incref: function!(c"Py_IncRef", (Object)),
            decref: function!(c"Py_DecRef", (Object)),
        })
    }

    /// The code of a frame, and what is known of it. The reference to it is kept: programs have few codes that read values.
    ///
    /// # Safety
    /// The calling thread must hold the interpreter lock, and `frame` be a frame.
    unsafe fn code(&self, frame: Object, seen: &mut Seen) -> Option<(Object, Source)> {
        // SAFETY: the lock is held; every new reference is given back or kept for good; null results are not used.
        unsafe {
            let code = (self.code)(frame);
            if code.is_null() {
                return None;
            }
            if let Some(source) = seen.sources.get(&code) {
                (self.decref)(code);
                return Some((code, source.clone()));
            }
            let file = (self.attribute)(code, c"co_filename".as_ptr());
            let text = if file.is_null() { std::ptr::null() } else { (self.text)(file) };
            let name = (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned());
            if !file.is_null() {
                (self.decref)(file);
            }
            let source = name.map(|name| Source {
                is_program: !name.contains("-packages/") && !name.starts_with('<'),
                file: name.into(),
            });
            if let Some(source) = source.as_ref().filter(|_| seen.sources.len() < MOST_SEEN) {
                seen.sources.insert(code, source.clone());
            } else {
                (self.decref)(code);
            }
            Some((code, source?))
        }
    }

    /// `file:line` of a frame of this code. To find the line takes long, so it is kept where the interpreter can tell the
    /// place in the code.
    ///
    /// # Safety
    /// As for [`Self::code`].
    unsafe fn describe(&self, frame: Object, code: Object, source: &Source, seen: &mut Seen) -> Rc<str> {
        // SAFETY: the lock is held.
        let describe = || format!("{}:{}", source.file, unsafe { (self.line)(frame) }).into();
        let Some(offset) = self.offset.filter(|_| seen.sources.contains_key(&code)) else { return describe() };
        // SAFETY: the lock is held.
        let place = (code, unsafe { offset(frame) });
        if seen.lines.len() >= MOST_SEEN && !seen.lines.contains_key(&place) {
            return describe();
        }
        Rc::clone(seen.lines.entry(place).or_insert_with(describe))
    }

    /// The innermost frame outside installed packages, else the innermost one.
    ///
    /// # Safety
    /// The calling thread must hold the interpreter lock.
    unsafe fn place(&self, seen: &mut Seen) -> Option<Rc<str>> {
        const DEEPEST: usize = 200;
        // SAFETY: the lock is held; each frame is owned while it is looked at.
        unsafe {
            let mut frame = (self.frame)();
            if frame.is_null() {
                return None;
            }
            (self.incref)(frame);
            let mut innermost = None;
            for _ in 0..DEEPEST {
                let found = self.code(frame, seen);
                let is_program = found.as_ref().is_some_and(|(_, source)| source.is_program);
                let place = found
                    .filter(|_| is_program || innermost.is_none())
                    .map(|(code, source)| self.describe(frame, code, &source, seen));
                let outer = (self.back)(frame);
                (self.decref)(frame);
                frame = outer;
                if is_program {
                    innermost = place;
                    break;
                }
                innermost = innermost.or(place);
                if frame.is_null() {
                    break;
                }
            }
            if !frame.is_null() {
                (self.decref)(frame);
            }
            innermost
        }
    }
}

/// Codes and lines that are kept in mind, at most, of each.
const MOST_SEEN: usize = 4096;

/// Where a code comes from.
#[derive(Clone)]
struct Source {
    file: Rc<str>,
    /// Is it not of an installed package?
    is_program: bool,
}

/// What a thread has found out about the program so far. Codes are alive as long as they are in here.
#[derive(Default)]
struct Seen {
    sources: HashMap<Object, Source>,
    /// `file:line` by code and place in it.
    lines: HashMap<(Object, c_int), Rc<str>>,
}

thread_local! {
    static SEEN: RefCell<Seen> = RefCell::default();
}

/// `file:line` of the Python code the calling thread runs; `None` if it runs none.
pub(crate) fn location() -> Option<Rc<str>> {
    static PYTHON: OnceLock<Option<Interpreter>> = OnceLock::new();
    let python = PYTHON.get_or_init(Interpreter::find).as_ref()?;
    // SAFETY: a thread that has a thread state may take the interpreter lock; it is given back at once.
    unsafe {
        if (python.is_initialized)() == 0 || (python.this_thread_state)().is_null() {
            return None;
        }
        let state = (python.ensure)();
        let place = SEEN.with_borrow_mut(|seen| python.place(seen));
        (python.release)(state);
        place
    }
}
