//! Inputs of the tests.

use flate2::read::GzDecoder;
use prism_import::kineto::{Imported, Options, import};
use serde_json::{Value, json};
use std::io::Read;
use std::path::{Path, PathBuf};

/// A file of the shared data, or none where that is absent (said on stderr).
pub(crate) fn shared(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data").join(name);
    if path.exists() {
        return Some(path);
    }
    #[allow(clippy::print_stderr, reason = "a skipped test says so")]
    {
        eprintln!("skipped: {} is not there", path.display());
    }
    None
}

/// Unpacks a `.tar.gz` (regular files, names without folders).
pub(crate) fn unpack(archive: &Path, into: &Path) {
    let mut bytes = Vec::new();
    GzDecoder::new(std::fs::File::open(archive).unwrap()).read_to_end(&mut bytes).unwrap();
    let mut at = 0;
    while at + 512 <= bytes.len() && bytes[at] != 0 {
        let header = &bytes[at..at + 512];
        let text =
            |range: std::ops::Range<usize>| String::from_utf8_lossy(&header[range]).trim_end_matches('\0').to_owned();
        let size = usize::from_str_radix(text(124..136).trim_matches([' ', '\0']), 8).unwrap();
        let name = text(0..100);
        let name = name.rsplit('/').next().unwrap();
        if matches!(header[156], 0 | b'0') && !name.starts_with("._") && !name.is_empty() {
            std::fs::write(into.join(name), &bytes[at + 512..at + 512 + size]).unwrap();
        }
        at += 512 + size.div_ceil(512) * 512;
    }
}

/// The traces of the 8-rank DLRM job in a folder.
pub(crate) fn dlrm() -> Option<tempfile::TempDir> {
    let archive = shared("traces/param/inputs__dlrm_kineto.tar.gz")?;
    let folder = tempfile::tempdir().unwrap();
    unpack(&archive, folder.path());
    Some(folder)
}

/// Imports a folder.
pub(crate) fn import_folder(folder: &Path) -> Imported {
    import(&[folder.to_owned()], &Options::default()).unwrap()
}

/// A made-up trace, event by event. Times are us.
pub(crate) struct Trace {
    events: Vec<Value>,
    header: Value,
    correlation: u64,
}

impl Trace {
    pub(crate) fn new(header: &Value) -> Self {
        Self { events: Vec::new(), header: header.clone(), correlation: 0 }
    }

    pub(crate) fn of_rank(rank: u32, world_size: u32) -> Self {
        Self::new(&json!({"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": world_size}}))
    }

    /// A launch and its kernel.
    pub(crate) fn kernel(&mut self, name: &str, stream: u32, (launch, start, duration): (f64, f64, f64)) -> &mut Self {
        self.kernel_with(name, stream, (launch, start, duration), &json!({}))
    }

    /// The same with more arguments of the kernel.
    pub(crate) fn kernel_with(
        &mut self,
        name: &str,
        stream: u32,
        (launch, start, duration): (f64, f64, f64),
        more: &Value,
    ) -> &mut Self {
        self.correlation += 1;
        let number = self.correlation;
        let mut arguments = json!({"device": 0, "stream": stream, "correlation": number});
        for (key, value) in more.as_object().unwrap() {
            arguments[key] = value.clone();
        }
        self.events.push(json!({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
            "ts": launch, "dur": 2, "args": {"correlation": number}}));
        self.events.push(json!({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream,
            "ts": start, "dur": duration, "args": arguments}));
        self
    }

    /// A span on the launching thread.
    pub(crate) fn span(&mut self, name: &str, start: f64, duration: f64) -> &mut Self {
        self.events.push(json!({"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1,
            "ts": start, "dur": duration, "args": {}}));
        self
    }

    /// A span with arguments.
    pub(crate) fn span_with(&mut self, name: &str, start: f64, duration: f64, arguments: &Value) -> &mut Self {
        self.span(name, start, duration);
        self.events.last_mut().unwrap()["args"] = arguments.clone();
        self
    }

    /// A call that puts nothing on the device.
    pub(crate) fn call(&mut self, name: &str, start: f64, duration: f64) -> &mut Self {
        self.correlation += 1;
        self.events.push(json!({"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 1, "tid": 1,
            "ts": start, "dur": duration, "args": {"correlation": self.correlation}}));
        self
    }

    /// What the profiler says of a communication.
    pub(crate) fn metadata(collective: &str, elements: u64, ranks: &[u32]) -> Value {
        json!({"Collective name": collective, "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float",
            "Group size": ranks.len(), "Process Group Name": "0", "Process Group Ranks": format!("{ranks:?}")})
    }

    pub(crate) fn text(&self) -> String {
        let mut document = self.header.clone();
        document["traceEvents"] = Value::Array(self.events.clone());
        document.to_string()
    }

    pub(crate) fn write(&self, folder: &Path, name: &str) {
        std::fs::write(folder.join(name), self.text()).unwrap();
    }
}
