//! A graph file that is read when it is used.

use super::HEADER_BYTES;
use super::read::Reader;
use crate::graph::{Graph, GraphError};
use memmap2::Mmap;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// A stored graph, mapped. Its size is known at once, its contents are checked when they are first asked for.
///
/// ```no_run
/// use prism_engine::graph::GraphFile;
///
/// let file = GraphFile::open("JOB.prism".as_ref())?;
/// assert!(file.num_ops() >= u64::from(file.world_size()));
/// let graph = file.graph()?; // reads and checks the file; from now on this is free
/// # Ok::<(), prism_engine::graph::GraphError>(())
/// ```
pub struct GraphFile {
    reader: Reader,
    graph: OnceLock<Arc<Graph>>,
}

impl GraphFile {
    /// Maps a graph file and checks its header and section table. Costs the same for every file: nothing else is read.
    pub fn open(path: &Path) -> Result<Self, GraphError> {
        let io = |source| GraphError::Io { action: "open", path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            return Err(io(std::io::Error::other("not a regular file")));
        }
        if metadata.len() < HEADER_BYTES as u64 {
            return Err(GraphError::format(metadata.len(), "the file ends inside the header"));
        }
        // SAFETY: the map is read-only and private to this graph; graph files are replaced by renaming, never written or
        // cut in place (see the text of `store`).
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self { reader: Reader::new(Arc::new(map))?, graph: OnceLock::new() })
    }

    /// The graph. The first call checks the whole file and fails if any of it is damaged; the following ones are free.
    pub fn graph(&self) -> Result<Arc<Graph>, GraphError> {
        if let Some(graph) = self.graph.get() {
            return Ok(Arc::clone(graph));
        }
        let graph = Arc::new(self.read()?);
        Ok(Arc::clone(self.graph.get_or_init(|| graph)))
    }

    /// The graph, for one owner.
    pub(super) fn read(&self) -> Result<Graph, GraphError> {
        self.reader.graph()
    }

    /// Number of ranks of the job, as the header tells; [`Self::graph`] makes sure.
    pub fn world_size(&self) -> u32 {
        self.reader.world_size()
    }

    /// Number of op programs, as the header tells; [`Self::graph`] makes sure.
    pub fn num_templates(&self) -> u32 {
        self.reader.num_templates()
    }

    /// Ops over all ranks, as the header tells; [`Self::graph`] makes sure.
    pub fn num_ops(&self) -> u64 {
        self.reader.num_ops()
    }

    /// Length of the file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.reader.file_bytes()
    }

    /// Free-form facts about the job; reads and checks only those.
    pub fn meta(&self) -> Result<BTreeMap<String, String>, GraphError> {
        self.reader.meta()
    }
}

/// A line, without reading the file.
impl std::fmt::Debug for GraphFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GraphFile")
            .field("world_size", &self.world_size())
            .field("ops", &self.num_ops())
            .field("bytes", &self.file_bytes())
            .finish_non_exhaustive()
    }
}
