-- Makes a higher coordinator epoch the only one that may append.
-- KEYS: meta
-- ARGV: the epoch that is to be active before, or '' for any lower one; the new epoch; store id
local epoch = redis.call('HGET', KEYS[1], 'epoch') or '0'
if epoch == ARGV[2] and redis.call('HGET', KEYS[1], 'raised_from') == ARGV[1] and ARGV[1] ~= '' then
  return 'REPEATED'
end
if ARGV[1] ~= '' and epoch ~= ARGV[1] then
  return redis.error_reply('FENCED the active coordinator epoch is ' .. epoch)
end
-- Compared as text: Lua's numbers lose digits of large ones.
local longer = #epoch - #ARGV[2]
if longer > 0 or (longer == 0 and epoch >= ARGV[2]) then
  return redis.error_reply('FENCED coordinator epoch ' .. epoch .. ' has begun; ' .. ARGV[2] .. ' is too late')
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'store_id', ARGV[3], 'raised_from', ARGV[1])
return 'RAISED'
