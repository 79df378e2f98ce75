package csi

// Event is something that happened in csid, or a gap.
type Event struct {
	// What to read on with once this one was dealt with.
	Cursor string
	// Events are lost between the one before and the next: look at everything anew. Nothing else is set.
	Gap bool

	Sequence uint64
	// Microseconds since 1970.
	Realtime uint64
	// mount, unmount, plugin-health: as org.csid1.xml lists them, and more may come.
	Type string
	// A plugin's id, NAMESPACE/VOLUME, an operation's id, or empty.
	Subject string

	// As they apply.
	Success               bool
	Error                 string
	Consumer, Tag, Plugin string
	UID                   uint32
	From, To              string
}
