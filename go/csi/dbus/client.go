// Package dbus is csid over D-Bus in pure Go: for programs that are built with CGO_ENABLED=0.
package dbus

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/internal/row"
)

// A closing client gives its cancellations this long to reach csid.
const lastWords = time.Second

// Client is csid, through its restarts. It owns one connection, and nothing else.
type Client struct {
	address string
	// Of every operation of this client.
	prefix string
	count  atomic.Uint64

	// life ends with Close, afterlife when the last words are said.
	life, afterlife context.Context
	die, bury       context.CancelFunc
	talking         sync.WaitGroup

	mu      sync.Mutex
	current *link
	dialing *dialing
	links   map[*link]bool
	readers map[*reader]bool
}

var _ csi.Client = (*Client)(nil)

// Open connects to csid, and fails where it cannot be reached now; later it is waited for. address is the path of csid's private
// socket or "system-bus"; empty: $CSID_SOCKET, else the socket at its usual place, else the system bus.
func Open(ctx context.Context, address string) (*Client, error) {
	if address == "" {
		address = os.Getenv("CSID_SOCKET")
	}
	c := &Client{
		address: address,
		prefix:  "go-" + rand.Text(),
		links:   map[*link]bool{},
		readers: map[*reader]bool{},
	}
	c.life, c.die = context.WithCancel(context.Background())
	c.afterlife, c.bury = context.WithCancel(context.Background())
	link, err := c.use(ctx)
	if err != nil {
		c.Close()
		return nil, told(err)
	}
	c.done(link, false)
	return c, nil
}

// Close ends the calls that go on, here alone. It may take a second, while cancellations are on their way.
func (c *Client) Close() error {
	c.mu.Lock()
	c.die()
	c.mu.Unlock()
	said := make(chan struct{})
	go func() {
		c.talking.Wait()
		close(said)
	}()
	select {
	case <-said:
	case <-time.After(lastWords):
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bury()
	for link := range c.links {
		c.end(link)
	}
	return nil
}

// ring wakes whoever waits for events.
func (c *Client) ring() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for reader := range c.readers {
		reader.wake()
	}
}

func (c *Client) operation() string { return fmt.Sprintf("%s-%d", c.prefix, c.count.Add(1)) }

// call asks the Manager.
func (c *Client) call(ctx context.Context, member string, v csi.Volume, o options, names []string, args ...any) (values, error) {
	return c.ask(ctx, request{path: root, iface: manager, member: member, args: args, options: o, volume: v, names: names})
}

// list asks the Manager for rows.
func (c *Client) list(ctx context.Context, member string, filter options) ([]row.Row, error) {
	r := request{path: root, iface: manager, member: member, names: []string{"rows"}}
	r.args = []any{map[string]dbus.Variant(filter)}
	body, err := c.ask(ctx, r)
	return body.Rows("rows"), err
}

// properties asks an object for those of one interface.
func (c *Client) properties(ctx context.Context, path, iface string) (values, error) {
	body, err := c.ask(ctx, getAll(path, iface))
	return properties(body), err
}

func getAll(path, iface string) request {
	return request{path: path, iface: "org.freedesktop.DBus.Properties", member: "GetAll", args: []any{iface}, short: true}
}

// pluginPath is a plugin's object: the id escaped as sd_bus_path_encode does, everything but letters and digits, and a digit in
// front, as _ and two hex digits.
func pluginPath(id string) string {
	var path strings.Builder
	path.WriteString(root + "/plugin/")
	if id == "" {
		path.WriteByte('_')
	}
	for i := range len(id) {
		b := id[i]
		switch {
		case b >= 'a' && b <= 'z', b >= 'A' && b <= 'Z', i > 0 && b >= '0' && b <= '9':
			path.WriteByte(b)
		default:
			fmt.Fprintf(&path, "_%02x", b)
		}
	}
	return path.String()
}
